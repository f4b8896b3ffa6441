"""Show drafted tokens and their verification."""
