"""The bound of rounding on logits, as executors/reference.py derives it."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.executors.reference import ERROR_FACTOR, ROUNDING_FACTOR


def allowed(plain: Tensor, exact: Tensor) -> float:
    """Return the distance from exact logits that any other way of computing them in the precision of `plain`, those of
    one process, may have: for another order of summation, other places to round, and a rounding of the largest."""
    rounding = ROUNDING_FACTOR * torch.finfo(plain.dtype).eps * (1 + float(exact.abs().max()))
    return ERROR_FACTOR * float((plain.double() - exact.double()).abs().max()) + rounding
