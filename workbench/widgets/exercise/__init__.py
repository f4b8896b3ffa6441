"""Exercises: a question whose answer is computed and checked in the notebook."""
