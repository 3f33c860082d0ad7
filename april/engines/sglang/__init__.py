"""Engines for SGLang servers, alone or behind a router."""
