"""Hosts: engines and functions in other processes, for one core that decides (docs/hosts.md)."""
