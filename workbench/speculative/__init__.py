"""Speculative decoding: settings, and proposers of draft tokens. This package may not import the engine or
experiments.
"""
