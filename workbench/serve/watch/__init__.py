"""Views of a server at work: its log as a value, metrics, traces of calls, telemetry."""
