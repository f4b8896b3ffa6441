"""Multiply by weights that are stored in panels: blocks of 32 output columns (see layout.py)."""

from compiled_kernels.blocked.layout import as_words, from_panels, in_panels, panels_problem, shape_of, to_panels

__all__ = [
    "as_words",
    "from_panels",
    "in_panels",
    "panels_problem",
    "shape_of",
    "to_panels",
]
