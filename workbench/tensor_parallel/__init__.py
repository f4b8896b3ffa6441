"""Tensor parallelism: ranks, processes of one host that each hold a share of every layer and of the cache."""
