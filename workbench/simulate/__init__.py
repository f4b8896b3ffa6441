"""Simulate serving: traffic, instances, fleets and step times, on integer clocks. This package may not import torch,
the engine, executors or experiments."""
