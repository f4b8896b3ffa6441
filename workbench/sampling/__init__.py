"""Turn logits into tokens: filters, samplers, user-defined components, and the sampler that a runner uses."""
