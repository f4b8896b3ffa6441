"""A chat with a model or an agent."""
