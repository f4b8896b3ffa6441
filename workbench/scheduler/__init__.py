"""Schedule requests: policies, the plan of a step, and the allocation of its pages. This package may not import torch,
models, executors or the engine."""
