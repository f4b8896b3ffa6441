"""The next token's distribution, filter by filter."""
