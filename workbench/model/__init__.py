"""Models as specs and modules: attention, feed-forward, loading, formats of weights, memory and cost. It may not import
samplers, schedulers, executors or the engine."""
