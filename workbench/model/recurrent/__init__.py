"""Layers with a recurrent state in place of keys and values."""
