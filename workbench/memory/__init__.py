"""Compute the memory of a model and its cache: reports, capacity, and a comparison of measured and predicted bytes.
This package may not import runs, measurements or reports."""
