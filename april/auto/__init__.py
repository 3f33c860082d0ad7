"""Tunes the settings of a run that are ``auto``: asks a simulation of the run for better values, and tries them."""
