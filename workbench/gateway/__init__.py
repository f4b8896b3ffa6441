"""The gateway in front of a server: API keys, limits, accounting, moderation, model routing and response caches."""
