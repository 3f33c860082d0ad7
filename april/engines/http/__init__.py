"""Clients of servers over HTTP: what all kinds share."""
