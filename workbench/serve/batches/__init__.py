"""Batches of calls: one file of both vendors' forms, carried out behind everything that a client waits for."""
