"""Simulated serving: traffic, instances, fleets and step times, on integer clocks. It may not import torch, the engine,
executors or experiments."""
