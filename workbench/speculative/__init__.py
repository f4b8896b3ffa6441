"""Speculative decoding: settings, and proposers of draft tokens. It may not import the engine or experiments."""
