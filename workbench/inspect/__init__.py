"""Inspect attention weights and hidden states of a request or a whole text. Does not import the engine, experiments or
widgets.
"""
