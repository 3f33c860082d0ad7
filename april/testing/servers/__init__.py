"""Fake inference servers on real loopback sockets, with the quirks of the real ones and faults on purpose."""
