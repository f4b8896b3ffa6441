"""Define experiments as values: settings, YAML, variants, and the runner and requests that they describe. This package
may not import measurements, runs, sweeps or reports."""
