"""The scheduler: policies, the plan of a step, and the allocation of its pages. It may not import torch, models,
executors or the engine."""
