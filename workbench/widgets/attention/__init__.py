"""Attention weights: of texts under way, of arrays; long contexts by tiles on a canvas."""
