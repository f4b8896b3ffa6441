"""Maintain a checkout: commands that are not installed with the package."""
