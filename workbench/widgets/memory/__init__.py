"""Memory of a model: weights, cache and activations."""
