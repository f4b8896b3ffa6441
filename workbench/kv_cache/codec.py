"""Store keys and values as a user-defined codec encodes them: what a codec is, and how one is loaded and checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from workbench.custom import check_arity, load_custom
from workbench.errors import WorkbenchError
from workbench.request import CustomPart

Side = Literal["keys", "values"]
SIDES: tuple[Side, Side] = ("keys", "values")
STAND_IN_TOKENS = 64  # of random keys and values, where only sizes are asked for
Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape of one row or block, and type, of each tensor


class Codec(Protocol):
    """A way to store keys and values: rows [token, kv_head, head_dim], or with `group` whole groups of tokens.

    A codec without `group` encodes a row once, when its token is computed. One with `group: int` gets blocks [block,
    group, kv_head, head_dim] of consecutive tokens, the first of which is a multiple of `group`; they are encoded once
    they are `cache.residual_length` tokens old, and newer tokens stay in full precision. A code must depend on its row
    or block alone: the same tokens are written beside others in another batch.

    Keys and values are encoded alike, unless the codec has two codecs `keys` and `values` in place of the verbs (see
    `CodecPair`). A codec with `calibrate(layer, keys, values)` gets a sample of a layer's keys and values, each
    [token, kv_head, head_dim] in float32, once when the model is loaded, and returns the codec of this layer.
    """

    def encode(self, rows: Tensor, /) -> tuple[Tensor, ...]:
        """Return the tensors to store, each [token, ...] (of blocks: [block, ...]), of the same types and sizes in
        every call."""
        ...

    @property
    def decode(self) -> Callable[..., Tensor]:
        """Return rows [token, kv_head, head_dim] (blocks) from the tensors that `encode` returned: a method of as
        many."""
        ...


@dataclass(frozen=True)
class CodecPair:
    """A codec of keys and another of values; of whole groups of `group` tokens, if it is given."""

    keys: Codec
    values: Codec
    group: int | None = None


class StoredLayout(NamedTuple):
    """The shape and type of each tensor that holds a row (or a block) of keys, and of values."""

    keys: Layout
    values: Layout

    @property
    def bytes(self) -> int:
        """Return the bytes of one row (or block) of keys and of values."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for layout in self for shape, dtype in layout)


@dataclass(frozen=True, eq=False)
class LoadedCodec:
    """A codec by its name in errors; what it returns is checked wherever it is called.

    `sides` encode keys and values; a codec that is still to be calibrated has none. `device` is where its own tensors
    are.
    """

    codec: Any
    name: str
    group: int | None = None
    sides: tuple[Codec, Codec] | None = None
    device: torch.device = torch.device("cpu")

    @property
    def needs_calibration(self) -> bool:
        return self.sides is None

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Return the axes between the first and the heads: () of rows, (group,) of blocks."""
        return () if self.group is None else (self.group,)

    def encode(self, rows: Tensor, side: Side) -> tuple[Tensor, ...]:
        """Encode rows [token, kv_head, head_dim] or blocks [block, group, kv_head, head_dim]. Raises WorkbenchError
        unless each tensor has a row (or block) for each."""
        try:
            stored = self._side(side).encode(rows)
        except Exception as error:
            raise WorkbenchError(f"{self.name}: encode raised {type(error).__name__}: {error}") from error
        if not isinstance(stored, tuple) or not stored or not all(isinstance(each, Tensor) for each in stored):
            raise WorkbenchError(f"{self.name}: encode must return a tuple of tensors, not {type(stored).__name__}")
        given, axis = ("rows", "token") if self.group is None else ("blocks", "block")
        for each in stored:
            if each.shape[:1] != rows.shape[:1]:
                raise WorkbenchError(
                    f"{self.name}: encode returned {list(each.shape)} for {given} {list(rows.shape)}; "
                    f"each tensor begins with [{axis}]"
                )
        return stored

    def decode(self, stored: tuple[Tensor, ...], num_kv_heads: int, head_dim: int, side: Side) -> Tensor:
        """Decode to rows [token, kv_head, head_dim] or blocks. Raises WorkbenchError for any other shape."""
        try:
            rows = self._side(side).decode(*stored)
        except Exception as error:
            raise WorkbenchError(f"{self.name}: decode raised {type(error).__name__}: {error}") from error
        expected = (len(stored[0]), *self.block_shape, num_kv_heads, head_dim)
        if not isinstance(rows, Tensor) or rows.shape != expected:
            shape = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise WorkbenchError(f"{self.name}: decode returned {shape}, not {list(expected)}")
        return rows

    def calibrate(self, layer: int, keys: Tensor, values: Tensor) -> LoadedCodec:
        """Return the codec of a layer, from a sample of its keys and values [token, kv_head, head_dim].

        Raises:
            WorkbenchError: it fails, or returns no codec or one of other groups.
        """
        try:
            made = self.codec.calibrate(layer, keys, values)
        except Exception as error:
            raise WorkbenchError(f"{self.name}: calibrate raised {type(error).__name__}: {error}") from error
        group = getattr(made, "group", self.group)
        if group != self.group:
            message = f"calibrate returned a codec of groups of {group}; say `group` before, as {group}"
            raise WorkbenchError(f"{self.name}: {message}")
        return LoadedCodec(made, self.name, self.group, _sides(made, f"{self.name}.calibrate"), keys.device)

    def ready(self, num_kv_heads: int, head_dim: int, device: str | torch.device = "cpu") -> LoadedCodec:
        """Return the codec itself, or where it is to be calibrated one calibrated on random numbers: for sizes, and
        for backends that are tried before the model has been run."""
        device = torch.device("cpu" if str(device) == "meta" else device)
        return _stand_in(self, num_kv_heads, head_dim, device) if self.needs_calibration else self

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that the codec itself holds, which all tokens share: tables, bases, scales."""
        return _tensors_in(self.codec, set())

    def _side(self, side: Side) -> Codec:
        if self.sides is None:
            raise WorkbenchError(f"{self.name}: is still to be calibrated")
        return self.sides[SIDES.index(side)]


def load_codec(part: CustomPart) -> LoadedCodec:
    """Load the codec that `part` names. Raises WorkbenchError where it cannot be one."""
    made, name = load_custom(part), f"codec {part.path}"
    group = getattr(made, "group", None)
    if group is not None and (not isinstance(group, int) or isinstance(group, bool) or group < 1):
        raise WorkbenchError(f"{name}: group must be a number of tokens, 1 or more, not {group!r}")
    if callable(calibrate := getattr(made, "calibrate", None)):
        check_arity(calibrate, 3, f"{name}.calibrate", "(layer, keys, values)")
        return LoadedCodec(made, name, group)
    return LoadedCodec(made, name, group, _sides(made, name))


def _sides(made: Any, name: str) -> tuple[Codec, Codec]:
    """Return the codecs of keys and of values. Raises WorkbenchError where one is none."""
    verbs = any(callable(getattr(made, verb, None)) for verb in ("encode", "decode"))
    keys, values = (getattr(made, side, None) for side in SIDES)
    if not verbs and keys is not None and values is not None:
        for side, each in zip(SIDES, (keys, values), strict=True):
            _check_verbs(each, f"{name}.{side}")
        return keys, values
    _check_verbs(made, name)
    return made, made


def _check_verbs(made: Any, name: str) -> None:
    for verb, shape in (("encode", "(rows)"), ("decode", "(*stored)")):
        if not callable(getattr(made, verb, None)):
            message = "a codec is a class with encode and decode, with codecs `keys` and `values`, or with calibrate"
            raise WorkbenchError(f"{name}: has no {verb}{shape}; {message}")
    check_arity(made.encode, 1, f"{name}.encode", "(rows)")


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each, seen)
    else:
        for each in (value if isinstance(value, dict) else getattr(value, "__dict__", {})).values():
            yield from _tensors_in(each, seen)


@functools.lru_cache(maxsize=64)
def _stand_in(codec: LoadedCodec, num_kv_heads: int, head_dim: int, device: torch.device) -> LoadedCodec:
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(2, STAND_IN_TOKENS, num_kv_heads, head_dim, generator=generator).to(device)
    return codec.calibrate(0, sample[0], sample[1])


@functools.lru_cache(maxsize=256)
def stored_layout(codec: LoadedCodec, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> StoredLayout:
    """Return the layout of a row (or block) of keys and of values, by encoding one of zeros."""
    ready = codec.ready(num_kv_heads, head_dim)
    rows = torch.zeros(1, *codec.block_shape, num_kv_heads, head_dim, dtype=dtype, device=ready.device)
    found = []
    for side in SIDES:
        stored = ready.encode(rows, side)
        ready.decode(stored, num_kv_heads, head_dim, side)
        found.append(tuple((tuple(each.shape[1:]), each.dtype) for each in stored))
    return StoredLayout(*found)


def stored_bytes(codec: LoadedCodec, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> float:
    """Return the bytes of one token's keys and values; of a group's bytes its share."""
    total = stored_layout(codec, num_kv_heads, head_dim, dtype).bytes
    return total if codec.group is None else total / codec.group
