"""The embedded engine on one GPU, for whoever has one for ten minutes: ``python -m benchmarks.gpu``.

Needs april, torch and transformers. Nothing is downloaded: the models have the shapes of Qwen3-0.6B, 1.7B and 4B and
random weights, and the lengths of their responses are forced.
"""
