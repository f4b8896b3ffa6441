"""Real models by name: which are known, which are at hand, and how a person fetches one."""
