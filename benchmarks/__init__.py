"""Measurements; each module that has a command line says how to run it. Not part of the installed package."""
