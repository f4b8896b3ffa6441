"""Typed controls made from a pydantic schema."""
