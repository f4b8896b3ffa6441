"""Compare records side by side."""
