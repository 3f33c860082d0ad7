"""Engines by name: made from their settings, recognised by their answers, asked what they offer."""
