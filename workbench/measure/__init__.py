"""Measure experiments, with one file for each kind of workload: rounds, measures, predictions and charts. This package
may not import sweeps, reports, claims or widgets."""
