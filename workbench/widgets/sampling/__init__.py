"""Show the next token's distribution, filter by filter."""
