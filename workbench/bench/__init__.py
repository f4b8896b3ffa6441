"""Benchmarks of kernels and models beside this machine's ceilings. It may not import sweeps, reports or claims."""
