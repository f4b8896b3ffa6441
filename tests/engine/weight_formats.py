"""Formats of weights in few bits that files have and no setting names: small groups, for small models."""

from __future__ import annotations

from dataclasses import replace

import torch

from compiled_kernels.linear.matrix_format import DENSE_MATRIX, MatrixFormat
from workbench.model.quantized import WeightFormat

GROUPED = {
    "int4 with minima": MatrixFormat("int4", 8, torch.float16, torch.float32),
    "int8 by group": MatrixFormat("int8", 8, torch.float16),
    "int8 with minima": MatrixFormat("int8", 4, torch.bfloat16, torch.float32),
    "fp8 by row": MatrixFormat("fp8"),
    "fp8 by block": MatrixFormat("fp8", 12),  # which does not divide all widths
}
FORMATS = {name: WeightFormat(format, format) for name, format in GROUPED.items()}
FORMATS["fp8 by block"] = replace(FORMATS["fp8 by block"], experts=DENSE_MATRIX)  # groups divide those of experts
FORMATS["int4 with minima, a dense head"] = WeightFormat(GROUPED["int4 with minima"], DENSE_MATRIX)
