"""Reads images from users and clients, checks them, and places them among the tokens of a prompt."""
