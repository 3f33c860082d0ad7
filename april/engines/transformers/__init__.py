"""The embedded engine, which generates from the trainer's own Hugging Face model."""
