"""Attention weights and hidden states of a request or a whole text. It may not import the engine, experiments or
widgets."""
