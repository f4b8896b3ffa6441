"""Speak OpenAI's chats, completions and embeddings."""
