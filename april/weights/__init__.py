"""Transfers a trainer's weights to engines, as tensors or as an adapter's files; torch is imported on first use."""
