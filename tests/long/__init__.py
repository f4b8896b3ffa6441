"""Drivers that run for hours, kill processes and watch memory: `python -m tests.long.NAME`."""
