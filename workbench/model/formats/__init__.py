"""Formats in which a model's tensors are stored, each a file; `open_checkpoint` chooses by what lies at the path."""
