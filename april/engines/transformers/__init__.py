"""The embedded engine: the trainer's own Hugging Face model."""
