"""Inputs of a loss: advantages and weights. Plain arrays in, plain arrays out; the losses are the trainer's.

The lowest floor: nothing of april but its errors is imported here, and torch only by functions that are given tensors.
"""
