"""Sweep experiments: expand an experiment into points, run them, and read their folder. This package may not import
reports, claims or widgets."""
