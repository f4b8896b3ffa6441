"""Ways from a packed batch to logits, a file each."""
