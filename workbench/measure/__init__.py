"""Measurements of experiments, one file a workload: rounds, figures, predictions and charts. It may not import sweeps,
reports, claims or widgets."""
