"""Who was computed when, and why."""
