"""Sweeps: expand an experiment into points, run them, and read their folder. It may not import reports, claims or
widgets."""
