"""Build a form of typed controls from a pydantic model."""
