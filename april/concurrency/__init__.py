"""Threads and locks that several parts of april use."""
