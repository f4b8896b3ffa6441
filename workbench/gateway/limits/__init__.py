"""Limits of callers: their arithmetic, where they are kept, reservations, headers and meters."""
