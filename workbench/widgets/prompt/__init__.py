"""Prompts, segment by segment."""
