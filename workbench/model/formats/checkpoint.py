"""A model on disk, whatever its format: a config and tensors that are read one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from workbench.model.checkpoint_names import CheckpointNames
from workbench.model.hf.fields import ConfigFields

QuantizedKind = Literal["int8", "int4", "fp8", "mxfp4"]


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [row, column] in few bits, one value an element: `(codes - zeros) * scales`.

    Args:
        kind: what a code is. `int8` and `int4`: int8 codes, signed; `fp8`: float8_e4m3fn; `mxfp4`: uint8 indices into
            the 16 values of E2M1.
        codes: [row, column], unpacked.
        scales: [row, column // group], or [row // block, column // block] for fp8, in the dtype of the file.
        zeros: as the scales, in units of a code; None where all are 0.
    """

    kind: QuantizedKind
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None


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

    def problem(self) -> str | None:
        """Return why its numbers cannot be read, from what the header says; None where they can."""
        return None

    def quantized(self) -> QuantizedMatrix | None:
        """Return what a kernel may multiply from without widening; None where the tensor is dense, or is no matrix of
        such a kind."""
        return None


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    Args:
        path: its folder or file.
        config: what its config.json says, or would say.
        tensors: by the names that the family's safetensors files have; fused and packed ones under their dense names.
        format: the format in words, for messages: "safetensors", "GPTQ 4 bits, group 128", ...
        names: the tensors' names, where they are not those of the family's safetensors files.
    """

    path: Path
    config: ConfigFields
    tensors: Mapping[str, StoredTensor]
    format: str = "safetensors"
    names: CheckpointNames | None = None
