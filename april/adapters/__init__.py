"""Adapters, one package per trainer. Each imports its trainer lazily; none imports another adapter."""
