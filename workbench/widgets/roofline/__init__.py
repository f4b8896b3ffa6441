"""What this machine could do, and what was done."""
