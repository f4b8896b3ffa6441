"""Pretrained models by name: known models, downloaded models, and downloads."""
