"""Formats of experts in few bits, for tests of mixtures."""

from __future__ import annotations

import torch

from compiled_kernels.linear.matrix_format import INT8_MATRIX, MatrixFormat
from workbench.model.quantized import WeightFormat

FORMATS = {
    "int8": WeightFormat(experts=INT8_MATRIX),
    "int8 by 32": WeightFormat(experts=MatrixFormat("int8", 32, torch.float16)),
    "int4 by 16": WeightFormat(experts=MatrixFormat("int4", 16, torch.float16)),
    "mxfp4": WeightFormat(experts=MatrixFormat.named("mxfp4")),
    "q5_1": WeightFormat(experts=MatrixFormat.named("q5_1")),
}
