"""Show the operators of a model's step, with their costs and kernels."""
