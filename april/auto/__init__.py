"""Tunes settings that are ``auto``: a run asks a simulation for better values and tries them."""
