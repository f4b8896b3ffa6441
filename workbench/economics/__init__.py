"""Costs of serving: prices, bills, prompt caches, routing and their reports. It may not import torch, the engine or
measurements."""
