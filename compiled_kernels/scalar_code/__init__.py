"""Convert a user's function of numbers to scalar code inside a kernel: it is traced, bounded over intervals, and
written as MLIR or Triton."""
