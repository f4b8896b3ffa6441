"""Store keys and values as a user-defined codec encodes them: what a codec is, and how one is loaded and checked."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workbench.custom import check_arity, load_custom
from workbench.errors import WorkbenchError
from workbench.request import CustomPart


class Codec(Protocol):
    """A way to store rows of keys or values [token, kv_head, head_dim].

    A row is encoded once, when its token is computed, and decoded whenever a query reads it. Its code must depend on
    the row alone: the same token is written beside other tokens in another batch.
    """

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors to store, each [token, kv_head, ...], of the same types and widths in every call."""
        ...

    def decode(self, *stored: Tensor) -> Tensor:
        """Return rows [token, kv_head, head_dim] from what `encode` returned."""
        ...


@dataclass(frozen=True, eq=False)
class LoadedCodec:
    """A codec by its name in errors; what it returns is checked wherever it is called."""

    codec: Codec
    name: str

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Encode rows [token, kv_head, head_dim]. Raises WorkbenchError unless each tensor has a row for each."""
        try:
            stored = self.codec.encode(rows)
        except Exception as error:
            raise WorkbenchError(f"{self.name}: encode raised {type(error).__name__}: {error}") from error
        if not isinstance(stored, tuple) or not stored or not all(isinstance(each, Tensor) for each in stored):
            raise WorkbenchError(f"{self.name}: encode must return a tuple of tensors, not {type(stored).__name__}")
        for each in stored:
            if each.shape[:2] != rows.shape[:2]:
                raise WorkbenchError(
                    f"{self.name}: encode returned {list(each.shape)} for rows {list(rows.shape)}; "
                    f"each tensor begins with [token, kv_head]"
                )
        return stored

    def decode(self, stored: tuple[Tensor, ...], head_dim: int) -> Tensor:
        """Decode to rows [token, kv_head, head_dim]. Raises WorkbenchError for any other shape."""
        try:
            rows = self.codec.decode(*stored)
        except Exception as error:
            raise WorkbenchError(f"{self.name}: decode raised {type(error).__name__}: {error}") from error
        expected = (*stored[0].shape[:2], head_dim)
        if not isinstance(rows, Tensor) or rows.shape != expected:
            shape = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise WorkbenchError(f"{self.name}: decode returned {shape}, not {list(expected)}")
        return rows


def load_codec(part: CustomPart) -> LoadedCodec:
    """Load the codec that `part` names. Raises WorkbenchError where it cannot be one."""
    made, name = load_custom(part), f"codec {part.path}"
    for verb, shape in (("encode", "(rows)"), ("decode", "(*stored)")):
        if not callable(getattr(made, verb, None)):
            raise WorkbenchError(f"{name}: has no {verb}{shape}; a codec is a class with encode and decode")
    check_arity(made.encode, 1, f"{name}.encode", "(rows)")
    return LoadedCodec(made, name)


@functools.lru_cache(maxsize=256)
def stored_layout(
    codec: LoadedCodec, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return shape [kv_head, ...] and type of each tensor that holds a token's keys (or values), by encoding one."""
    row = torch.zeros(1, num_kv_heads, head_dim, dtype=dtype)
    stored = codec.encode(row)
    codec.decode(stored, head_dim)
    return tuple((tuple(each.shape[1:]), each.dtype) for each in stored)


def stored_bytes(codec: LoadedCodec, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys (or values)."""
    layout = stored_layout(codec, num_kv_heads, head_dim, dtype)
    return sum(torch.Size(shape).numel() * each.itemsize for shape, each in layout)
