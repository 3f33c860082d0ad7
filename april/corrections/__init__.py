"""Computes advantages, importance weights and a loss from plain arrays or tensors, for the trainer's own code.

This is the lowest layer of april: it imports only april's errors, and imports torch only in functions that get tensors.
"""
