"""Show prompts segment by segment."""
