"""Commands that the project's own maintenance runs from a checkout; no part of what is installed."""
