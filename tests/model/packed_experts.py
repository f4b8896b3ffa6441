"""Random codes in place of a dense state's experts."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kernels.expert_linear.cases import random_stack
from workbench.model.quantized import WeightFormat, scales_of

FORMATS = {
    "int8": WeightFormat(experts="int8", expert_group=0),
    "int8 by 32": WeightFormat(experts="int8", expert_group=32),
    "int4 by 16": WeightFormat(experts="int4", expert_group=16),
    "mxfp4": WeightFormat(experts="mxfp4"),
}


def pack_experts(state: dict[str, Tensor], format: WeightFormat, seed: int) -> dict[str, Tensor]:
    """Return a state whose stacks `gate_up` and `down` are random codes of `format`, with scales beside them, about as
    large as the numbers that were there."""
    generator, found = torch.Generator().manual_seed(seed), dict(state)
    for name, dense in state.items():
        if not name.endswith(("gate_up", "down")) or dense.ndim != 3:
            continue
        shape = (dense.shape[0], dense.shape[1], dense.shape[2])
        kind, group = format.expert_dtype, format.columns_per_expert_scale
        codes, scales = random_stack(generator, kind, group, shape, torch.float32)
        assert scales is not None
        # Numbers of a stack are near 2: scaled by a power of two, exponents by its logarithm.
        power = round(float(dense.float().nan_to_num().std().clamp_min(1e-3).log2())) - 1
        scales = (scales.int() + power).to(torch.uint8) if kind == "mxfp4" else scales * 2.0**power
        found[name], found[scales_of(name)] = codes, scales
    return found
