"""Convert the engine's events to the pieces of an answer."""
