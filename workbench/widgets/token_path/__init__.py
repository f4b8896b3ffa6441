"""Show the path of a token through the model: every stage from its id to the draw of the next token, and the effect of
heads and layers."""
