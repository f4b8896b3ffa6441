"""Describe models as specs and run them as modules: attention, feed-forward, loading, formats of weights, memory and
cost. This package may not import samplers, schedulers, executors or the engine."""
