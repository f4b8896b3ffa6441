"""Compute the logits of a text in the plainest way: no cache, no batch, no pages, no backend."""
