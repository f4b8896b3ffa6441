"""Compute prompts in one pool of engines and decode in another. `workbench.cluster.pools` has the public interface."""
