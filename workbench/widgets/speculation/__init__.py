"""Drafted tokens, and what became of them."""
