"""The study of ``benchmarks/study`` on GPUs: Qwen3 on public mathematics, at two sizes, by one command.

Arms, losses, estimates and verdicts are those of ``benchmarks/study``; what is here is a real model, a real verifier,
wall-clock time and checkpoints. It needs april, torch, transformers, ``datasets``, matplotlib for the picture and, for
eight GPUs, vLLM or SGLang.
"""
