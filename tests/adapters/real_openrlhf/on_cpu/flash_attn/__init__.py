"""Stands in for flash-attn, which OpenRLHF imports and, with ``eager`` attention, never calls."""
