"""Chat with a model or an agent."""
