"""Shares one scheduler among the ranks of a trainer, or runs it in a Ray actor."""
