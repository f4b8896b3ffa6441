"""Show texts as tokens."""
