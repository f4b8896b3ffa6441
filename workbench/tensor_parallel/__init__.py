"""Tensor parallelism: ranks are processes, each of which holds a shard of every layer and of the cache."""
