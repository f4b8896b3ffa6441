"""Play a prompt under any experiment's settings."""
