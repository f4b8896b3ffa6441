"""Benchmark other inference tools on the same weights as the workbench; no part of the library."""
