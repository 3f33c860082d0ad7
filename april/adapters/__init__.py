"""Adapters: one leaf per trainer, which imports its trainer lazily; none imports another."""
