"""Compute costs of serving: prices, bills, prompt caches, routing and their reports. This package may not import torch,
the engine or measurements."""
