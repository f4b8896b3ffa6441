"""Read quantized safetensors formats: matrices that are stored as several tensors, checks of these tensors, and packed
bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.model.formats.checkpoint import QuantizedMatrix, StoredTensor
from workbench.model.hf.fields import ConfigFields

FLOATS = ("F32", "F16", "BF16")
Stored = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """A quantized tensor of the model that is stored as several tensors. `parts` has these by the last word of their
    names (`weight`, `SCB`).
    """

    name: str
    parts: Stored

    @abstractmethod
    def quantized(self) -> QuantizedMatrix: ...

    def read(self) -> Tensor:
        return self.quantized().dequantize()


@dataclass(frozen=True)
class Module:
    """One module of the model, such as a linear layer: `parts` has its stored tensors by the last word of their names
    (`weight`, `SCB`), and `config` is the quantization config.
    """

    name: str
    config: ConfigFields
    parts: Stored

    def shape(self, part: str, dtypes: tuple[str, ...], axes: int = 2) -> tuple[int, ...]:
        """Return the shape of the tensor `part`. Raises WorkbenchError if it is missing, has another type or another
        number of axes.
        """
        tensor = self.parts.get(part)
        if tensor is None:
            raise WorkbenchError(f"{self.file}: lacks {self.name}.{part}, which {self.config.source} asks for")
        if tensor.dtype not in dtypes or len(tensor.shape) != axes:
            given = f"{tensor.dtype} {list(tensor.shape)}"
            raise WorkbenchError(f"{self.file}: {self.name}.{part} is {given}, not {axes}-d {' or '.join(dtypes)}")
        if 0 in tensor.shape:
            raise WorkbenchError(f"{self.file}: {self.name}.{part} has shape {list(tensor.shape)}: it holds no numbers")
        return tensor.shape

    def expect(self, part: str, dtypes: tuple[str, ...], *shape: int) -> None:
        """Raise WorkbenchError unless the tensor `part` has one of these types and this shape."""
        given = self.shape(part, dtypes, len(shape))
        if given != shape:
            raise WorkbenchError(
                f"{self.file}: {self.name}.{part} has shape {list(given)}; {self.config.source} and its other tensors "
                f"ask for {list(shape)}"
            )

    def only(self, *parts: str) -> None:
        """Raise WorkbenchError if the module has any tensor besides `parts`: a second copy, or an unsupported one."""
        extra = sorted(self.parts.keys() - set(parts))
        if extra:
            raise WorkbenchError(f"{self.file}: {self.name}.{extra[0]} is not a part of a matrix in this format")

    @cached_property
    def file(self) -> object:
        return next(iter(self.parts.values())).file

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def read(self, part: str) -> Tensor:
        return self.parts[part].read()


def modules(stored: Stored, mark: str, parts: tuple[str, ...]) -> dict[str, dict[str, StoredTensor]]:
    """Return, for each module with a tensor named `mark`, its stored tensors by the last word of their names, one of
    `parts`.
    """
    found = {name.removesuffix(f".{mark}"): {} for name in stored if name.endswith(f".{mark}")}
    for name, tensor in stored.items():
        for part in parts:
            module = name.removesuffix(f".{part}")
            if module != name and module in found:
                found[module][part] = tensor
    return found


def refuse_unconverted(config: ConfigFields, key: str, packed: Mapping[str, object]) -> None:
    """Raise WorkbenchError if a module is stored quantized although the config excludes it under `key`. The config's
    names are whole words of a module's path.
    """
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.invalid(key, names, "a list of names of modules")
    for module in packed:
        wrong = next((name for name in names if f".{name}." in f".{module}."), None)
        if wrong:
            raise WorkbenchError(f"{config.source}: {key} has {wrong!r}, yet the weights of {module} are packed")


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack values of 4 or 8 bits as `unpack_bits` reads them: uint8 [row, column] -> int32 [row, word], rounded up."""
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % (32 // bits)))
    octets = values if bits == 8 else values[:, ::2] | values[:, 1::2] << 4
    return octets.contiguous().view(torch.int32)


def unpack_bits(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack the first `count` values of `bits` bits along the last axis of int32 `words`, the lowest bits first: [...,
    word] -> uint8 [..., count]. A value may straddle two words."""
    if 8 % bits == 0:
        octets = words.contiguous().view(torch.uint8)
        values = [octets >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
        return torch.stack(values, -1).flatten(-2)[..., :count]
    first = torch.arange(count) * bits
    wide = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
    pair = wide[..., first // 32] | wide[..., first // 32 + 1] << 32
    return (pair >> first % 32 & (1 << bits) - 1).to(torch.uint8)
