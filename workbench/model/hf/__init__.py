"""Hugging Face folders: config.json, weights, saving."""
