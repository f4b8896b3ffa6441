"""A model on disk, whatever its format: a config and tensors that are read one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compiled_kernels.linear.matrix_format import E2M1_TWICE, MatrixFormat
from workbench.model.checkpoint_names import CheckpointNames
from workbench.model.hf.fields import ConfigFields

QuantizedKind = Literal["int8", "int4", "int3", "int2", "fp8", "mxfp4"]


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [row, column] in few bits, one value an element: `(codes - zeros) * scales + minima`.

    Args:
        kind: what a code is. `int8` to `int2`: signed integers; `fp8`: float8_e4m3fn; `mxfp4`: indices of E2M1.
        codes: returns the codes, unpacked when called: [row, column], int8, float8_e4m3fn or uint8.
        scales: [row // rows, column // group], rounded up, floats.
        group: columns that share a scale.
        rows: rows that share a scale.
        zeros: int8 or int16, as the scales, in units of a code; None where all are 0.
        minima: as the scales, floats, in place of zeros: 4-bit codes are 0 to 15 then. None where there are none.
        group_index: the group of each column, int32, where groups are not runs of columns.
    """

    kind: QuantizedKind
    codes: Callable[[], Tensor]
    scales: Tensor
    group: int
    rows: int = 1
    zeros: Tensor | None = None
    minima: Tensor | None = None
    group_index: Tensor | None = None

    def dequantize(self) -> Tensor:
        """Return the matrix in float32. An integer of up to 8 bits times a scale of float16 or bfloat16 is exact."""
        codes = self.codes()
        values = torch.tensor(E2M1_TWICE)[codes.int()] / 2 if self.kind == "mxfp4" else codes.float()
        if self.zeros is not None:
            values -= self._spread(self.zeros, values)
        values.mul_(self._spread(self.scales, values))
        return values if self.minima is None else values.add_(self._spread(self.minima, values))

    def _spread(self, each: Tensor, values: Tensor) -> Tensor:
        """Return the number of each element's group, in float32; last groups may be partial."""
        rows, columns = values.shape
        each = each.float().repeat_interleave(min(self.rows, rows), 0)[:rows]
        if self.group_index is not None:
            return each[:, self.group_index.long()]
        return each.repeat_interleave(min(self.group, columns), 1)[:, :columns]


@dataclass(frozen=True)
class StoredTensor(ABC):
    """A tensor under the name and in the shape that the family stores it in; numbers are read when they are asked for.

    Args:
        file: where it lies, for errors.
        dtype: the name of the stored type, as its format has it: F32, BF16, I8, Q4_K, ...
        shape: of the dense tensor, also where it is stored packed.
        nbytes: what it takes in its files, scales and zeros included.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @abstractmethod
    def read(self) -> Tensor:
        """Return the tensor as floats, exactly as its format defines them: the stored type where that is a float, and
        float32 where it is quantized. A view of the mapped file where that is possible."""

    def read_into(self, out: Tensor) -> None:
        """Read the tensor into a contiguous one of its shape, cast to its type."""
        out.copy_(self.read())

    def problem(self) -> str | None:
        """Return why its numbers cannot be read, from what the header says; None where they can."""
        return None

    def quantized(self) -> QuantizedMatrix | None:
        """Return the matrix, or those of a stack one below the other, in its few bits, where it is stored so: scales
        are read, codes when they are asked for. None where it is dense, or its format is none of these kinds."""
        return None

    def own_format(self) -> MatrixFormat | None:
        """Return the format that a matrix is stored in, bit for bit: in words, or float16; None where it is in none."""
        return None

    def fill(self, stored: Sequence[Tensor]) -> None:
        """Write the tensors of a matrix as `own_format` stores them."""
        raise NotImplementedError


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    Args:
        path: its folder or file.
        config: what its config.json says, or would say.
        tensors: by the names that the family's safetensors files have; fused and packed ones under their dense names.
        format: the format in words, for messages: "safetensors", "GPTQ 4 bits in groups of 128", ...
        names: the tensors' names, where they are not those of the family's safetensors files.
        kept: what was found of parameters that can stay in their few bits (see hf/kept.py), for the next who asks.
    """

    path: Path
    config: ConfigFields
    tensors: Mapping[str, StoredTensor]
    format: str = "safetensors"
    names: CheckpointNames | None = None
    kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
