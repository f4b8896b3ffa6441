"""Change load, mix, policy and chunk size while requests are served, and show the effects over one time axis."""
