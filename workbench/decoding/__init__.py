"""Decoding methods that need more than a sampler: beams, pairs of streams, user-defined searches."""
