"""Show attention weights of generated texts or of arrays; long contexts are drawn in tiles."""
