"""Define the interface of a model on disk, independent of its format: a config, and tensors that are read one by
one.
"""

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
    """A quantized matrix [row, column]: each element is `(code - zero) * scale + minimum`.

    Args:
        kind: the kind of code. `int8` to `int2`: signed integers; `fp8`: float8_e4m3fn; `mxfp4`: indices of E2M1.
        codes: a function that unpacks and returns the codes: [row, column], int8, float8_e4m3fn or uint8.
        scales: [row // rows, column // group], rounded up, floats.
        group: columns that share a scale.
        rows: rows that share a scale.
        zeros: int8 or int16, in the shape of the scales, in units of a code; None if all are 0.
        minima: floats in the shape of the scales, used instead of zeros (4-bit codes are then 0 to 15); None without
            minima.
        group_index: the group of each column, int32, if groups are not consecutive columns.
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
    """A tensor of a model on disk, with the family's name and shape; its numbers are read on demand.

    Args:
        file: its file, for error messages.
        dtype: the name of the stored type, as its format has it: F32, BF16, I8, Q4_K, ...
        shape: the shape of the dense tensor, even if it is stored packed.
        nbytes: its bytes in the files, scales and zeros included.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @abstractmethod
    def read(self) -> Tensor:
        """Return the tensor as floats, exactly as its format defines them: in the stored type if that is a float, in
        float32 if it is quantized. The result is a view of the mapped file if that is possible."""

    def read_into(self, out: Tensor) -> None:
        """Read the tensor into `out`, a contiguous tensor of the same shape, cast to the type of `out`."""
        out.copy_(self.read())

    def problem(self) -> str | None:
        """Return the reason why the numbers cannot be read, found in the header only; None if they can."""
        return None

    def quantized(self) -> QuantizedMatrix | None:
        """Return the tensor as a quantized matrix: scales are read now, codes on demand. The matrices of a stack are
        concatenated along rows. None for a dense tensor, and for a format that `QuantizedMatrix` does not express.
        """
        return None

    def own_format(self) -> MatrixFormat | None:
        """Return the in-memory format (packed words or float16) that holds a stored matrix bit for bit; None if there
        is none.
        """
        return None

    def fill(self, stored: Sequence[Tensor]) -> None:
        """Write the tensors of a matrix (codes, scales, minima) into `stored`, in the format `own_format`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    Args:
        path: its folder or file.
        config: its config.json, or the equivalent.
        tensors: tensors by the names in the family's safetensors files; fused and packed ones under their dense names.
        format: a description of the format, for messages: "safetensors", "GPTQ 4 bits in groups of 128", ...
        names: the tensors' names, if they differ from those of the family's safetensors files.
        kept: cached results on parameters that can stay quantized (see hf/kept.py).
    """

    path: Path
    config: ConfigFields
    tensors: Mapping[str, StoredTensor]
    format: str = "safetensors"
    names: CheckpointNames | None = None
    kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
