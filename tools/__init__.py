"""Maintenance commands for a checkout, which are not installed."""
