"""Grouped-query attention from a trained model: key/value heads are pooled by their mean, so the cache shrinks.

Ainslie et al., 2023, "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints",
section 2.1:

    W_K of a group  =  mean over its heads of W_K,    W_V likewise

Here all key/value heads become one (multi-query attention; Shazeer, 2019). The paper trains on for 5% of the steps
after pooling; these weights are pooled alone.
"""
