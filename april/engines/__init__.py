"""Inference engines that generate tokens: one protocol for all of them, and one package per kind of engine."""
