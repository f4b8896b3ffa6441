"""Constrain what a request may say: grammars, choices, thoughts, and an end that always fits."""
