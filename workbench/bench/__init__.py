"""Benchmark kernels and models against this machine's ceilings. This package may not import sweeps, reports or
claims."""
