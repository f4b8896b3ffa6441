"""Measure fleets of engine processes and compare them with the simulator's prediction: calibration, prediction, rounds.
This package may not import comparisons of other kinds, sweeps or reports."""
