"""Read MXFP4 weights as gpt-oss publishes them (`quant_method: mxfp4`): the experts' matrices, stacked.

`X_blocks` uint8 [expert, out, in / 32, 16] has two values of E2M1 in a byte, the lower nibble first; `X_scales` uint8
[expert, out, in / 32] is an exponent: values times 2^(scale - 127). The dense tensor `X` is [expert, in, out].

https://github.com/openai/gpt-oss: gpt_oss/torch/weights.py; OCP Microscaling Formats (MX) v1.0, sections 5.3 and 5.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.model.formats.checkpoint import QuantizedMatrix, StoredTensor
from workbench.model.formats.packed import Stored
from workbench.model.hf.fields import ConfigFields

BLOCK, PAIRS = 32, 16  # values and bytes of a block


@dataclass(frozen=True)
class MXFP4Experts(StoredTensor):
    """The matrices of all experts of a layer, stored as MXFP4."""

    blocks: StoredTensor
    scales: StoredTensor

    def read(self) -> Tensor:
        return self.quantized().dequantize().unflatten(0, self.blocks.shape[:2]).transpose(1, 2)

    def quantized(self) -> QuantizedMatrix:
        scales = self.scales.read().view(torch.float8_e8m0fnu).float().flatten(0, 1)
        return QuantizedMatrix("mxfp4", self._codes, scales, BLOCK)

    def _codes(self) -> Tensor:
        pairs = self.blocks.read().flatten(2).flatten(0, 1)
        return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)


def mxfp4_tensors(config: ConfigFields, stored: Stored) -> tuple[dict[str, StoredTensor], str]:
    """Return the MXFP4 experts' matrices under their dense names, and a description of the format. Raises
    WorkbenchError if tensors disagree with each other.
    """
    found: dict[str, StoredTensor] = {}
    for name, blocks in stored.items():
        base = name.removesuffix("_blocks")
        if base == name:
            continue
        scales = stored.get(f"{base}_scales")
        if scales is None:
            raise WorkbenchError(f"{blocks.file}: has {name} but lacks {base}_scales")
        if base in stored:
            raise WorkbenchError(f"{blocks.file}: holds both {base} and {name}")
        right = blocks.dtype == scales.dtype == "U8" and len(blocks.shape) == 4 and blocks.shape[-1] == PAIRS
        if not right or scales.shape != blocks.shape[:3]:
            given = f"{blocks.dtype} {list(blocks.shape)} with {scales.dtype} {list(scales.shape)}"
            raise WorkbenchError(f"{blocks.file}: {name} is {given}, not U8 [expert, out, block, 16] with scales")
        experts, out, count, _ = blocks.shape
        found[base] = MXFP4Experts(
            Path(blocks.file), "MXFP4", (experts, count * BLOCK, out), blocks.nbytes + scales.nbytes, blocks, scales
        )
    return found, "MXFP4"
