"""Threads, worker processes and locks that several parts of april use."""
