"""Programs that compute logits from a packed batch, one file each."""
