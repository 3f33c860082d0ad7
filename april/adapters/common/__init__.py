"""Helpers that several trainers' adapters use."""
