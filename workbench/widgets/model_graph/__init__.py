"""The operators of a model's step, with their costs and the kernels that carry them out."""
