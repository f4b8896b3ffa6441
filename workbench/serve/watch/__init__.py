"""Observe a server at work: its log, metrics, traces of calls, and telemetry."""
