"""Transfers a trainer's weights to engines, directly or as an adapter's directory; torch is imported on first use."""
