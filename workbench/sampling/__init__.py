"""Turn logits into tokens: filters, samplers, user-defined components, and the sampler of a runner."""
