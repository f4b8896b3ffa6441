"""Show the memory of a model: weights, cache and activations."""
