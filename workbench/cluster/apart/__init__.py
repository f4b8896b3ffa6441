"""Compute prompts in one pool of engines and decode in another; `workbench.cluster.pools` is the way in."""
