"""Methods of decoding: how rows of logits become tokens where the sampler alone does not decide it."""
