"""Layers with a state in place of keys and values."""
