"""Compute a text plainly: no cache, no batch, no pages, no backend."""
