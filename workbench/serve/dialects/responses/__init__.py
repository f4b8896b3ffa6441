"""Speak OpenAI's Responses."""
