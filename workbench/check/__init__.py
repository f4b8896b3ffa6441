"""Check a model before it is used: what of it is carried out, at which size and speed, and whether it is right."""
