"""Weights laid out in panels, and the products that read them."""

from compiled_kernels.blocked.layout import as_words, from_panels, in_panels, panels_problem, shape_of, to_panels

__all__ = [
    "as_words",
    "from_panels",
    "in_panels",
    "panels_problem",
    "shape_of",
    "to_panels",
]
