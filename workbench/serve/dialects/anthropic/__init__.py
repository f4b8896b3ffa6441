"""Speak Anthropic's Messages."""
