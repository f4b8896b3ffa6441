"""Experiments as values: settings, YAML, variants, and the runner and requests that they describe. It may not import
measurements, runs, sweeps or reports."""
