"""Iteration-level scheduling: requests join and leave between steps, and none waits for a batch to end.

Yu et al., 2022, "Orca: A Distributed Serving System for Transformer-Based Generative Models", section 3.1. With batches
that begin and end together, a request of l_i output tokens holds its place for the longest of its batch:

    held  =  sum over i of max_j l_j     against     sum over i of l_i     step by step

It is what the workbench does by default (`schedule.kind: continuous`); the baseline computes padded rows until the
last of a batch ends (`padded`).
"""
