"""Weights on their way from a trainer's process to engines, without a directory; torch is imported when it is used."""
