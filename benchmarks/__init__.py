"""Benchmarks that are not part of the library: other tools on the same weights."""
