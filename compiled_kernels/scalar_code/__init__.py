"""A user's function of numbers as scalar code inside a kernel: traced, bounded over intervals, and written as MLIR or
Triton."""
