"""Converts values to MessagePack, files and torch tensors, without pickle."""
