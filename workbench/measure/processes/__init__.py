"""Fleets of processes measured, beside what the simulator predicts of them: calibration, prediction, rounds. It may not
import comparisons of other kinds, sweeps or reports."""
