"""Define the interface of user-defined codecs, which store keys and values in another form; load and check them."""

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
STAND_IN_TOKENS = 64  # tokens of random keys and values, when only sizes are needed
Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # (shape of one row or block, dtype) of each tensor


class Codec(Protocol):
    """A way to store keys and values in another form: rows [token, kv_head, head_dim], or with `group` whole groups of
    tokens.

    A codec without `group` encodes a row once, when its token is computed. A codec with `group: int` gets blocks
    [block, group, kv_head, head_dim] of consecutive tokens, the first of which is a multiple of `group`; they are
    encoded once they are `cache.residual_length` tokens old, and newer tokens stay in full precision. A code must
    depend only on its row or block, because the other rows differ from batch to batch.

    Keys and values are encoded alike, unless the codec has attributes `keys` and `values`, a codec each, in place of
    these methods (see `CodecPair`). A codec with `calibrate(layer, keys, values)` gets a sample of a layer's keys and
    values, each [token, kv_head, head_dim] in float32, once when the model is loaded, and returns the codec of this
    layer.
    """

    def encode(self, rows: Tensor, /) -> tuple[Tensor, ...]:
        """Return the tensors to store for some rows, each [token, ...] (for blocks: [block, ...]), with the same types
        and sizes in every call."""
        ...

    @property
    def decode(self) -> Callable[..., Tensor]:
        """Return a function that computes rows [token, kv_head, head_dim] (or blocks) from the tensors that `encode`
        returned, one argument for each.
        """
        ...


@dataclass(frozen=True)
class CodecPair:
    """A codec for keys together with a codec for values; both encode groups of `group` tokens, if given."""

    keys: Codec
    values: Codec
    group: int | None = None


class StoredLayout(NamedTuple):
    """The shape and dtype of each tensor that stores one row (or block) of keys, and of values."""

    keys: Layout
    values: Layout

    @property
    def bytes(self) -> int:
        """Return the number of bytes of one row (or block) of keys and of values together."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for layout in self for shape, dtype in layout)


@dataclass(frozen=True, eq=False)
class LoadedCodec:
    """A user-defined codec with its name for error messages; the result of every call is checked.

    `sides` are the codecs of keys and of values; None before calibration. `device` has the codec's own tensors.
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
        """Return the axes of a row or block between its first axis and its heads: () for rows, (group,) for blocks."""
        return () if self.group is None else (self.group,)

    def encode(self, rows: Tensor, side: Side) -> tuple[Tensor, ...]:
        """Encode rows [token, kv_head, head_dim] or blocks [block, group, kv_head, head_dim]. Raises WorkbenchError
        unless each returned tensor has one row for each of these."""
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
        """Decode stored tensors to rows [token, kv_head, head_dim] or blocks. Raises WorkbenchError if the codec
        returns another shape.
        """
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
        """Return the codec of one layer, calibrated on a sample of the layer's keys and values [token, kv_head,
        head_dim].

        Raises:
            WorkbenchError: it fails, returns no codec, or returns a codec with another group size.
        """
        try:
            made = self.codec.calibrate(layer, keys, values)
        except Exception as error:
            raise WorkbenchError(f"{self.name}: calibrate raised {type(error).__name__}: {error}") from error
        group = getattr(made, "group", self.group)
        if group != self.group:
            message = f"calibrate returned a codec of groups of {group}; declare `group` as {group} on the class"
            raise WorkbenchError(f"{self.name}: {message}")
        return LoadedCodec(made, self.name, self.group, _sides(made, f"{self.name}.calibrate"), keys.device)

    def ready(self, num_kv_heads: int, head_dim: int, device: str | torch.device = "cpu") -> LoadedCodec:
        """Return the codec itself, or if it needs calibration, a copy calibrated on random numbers: the copy gives
        sizes, and serves to try backends before the model has run.
        """
        device = torch.device("cpu" if str(device) == "meta" else device)
        return _stand_in(self, num_kv_heads, head_dim, device) if self.needs_calibration else self

    def tensors(self) -> Iterator[Tensor]:
        """Yield the codec's own tensors, shared by all tokens: tables, bases, scales."""
        return _tensors_in(self.codec, set())

    def _side(self, side: Side) -> Codec:
        if self.sides is None:
            raise WorkbenchError(f"{self.name}: is not calibrated yet")
        return self.sides[SIDES.index(side)]


def load_codec(part: CustomPart) -> LoadedCodec:
    """Load the codec that `part` names; raises WorkbenchError if it is not a codec."""
    made, name = load_custom(part), f"codec {part.path}"
    group = getattr(made, "group", None)
    if group is not None and (not isinstance(group, int) or isinstance(group, bool) or group < 1):
        raise WorkbenchError(f"{name}: group must be a number of tokens, 1 or more, not {group!r}")
    if callable(calibrate := getattr(made, "calibrate", None)):
        check_arity(calibrate, 3, f"{name}.calibrate", "(layer, keys, values)")
        return LoadedCodec(made, name, group)
    return LoadedCodec(made, name, group, _sides(made, name))


def _sides(made: Any, name: str) -> tuple[Codec, Codec]:
    """Return the codecs of keys and of values; WorkbenchError if one lacks a method."""
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
    """Return the layout in which the codec stores one row (or block) of keys and of values, found by encoding zeros."""
    ready = codec.ready(num_kv_heads, head_dim)
    rows = torch.zeros(1, *codec.block_shape, num_kv_heads, head_dim, dtype=dtype, device=ready.device)
    found = []
    for side in SIDES:
        stored = ready.encode(rows, side)
        ready.decode(stored, num_kv_heads, head_dim, side)
        found.append(tuple((tuple(each.shape[1:]), each.dtype) for each in stored))
    return StoredLayout(*found)


def stored_bytes(codec: LoadedCodec, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> float:
    """Return the number of bytes of one token's keys and values; for a codec of groups, a group's bytes divided by its
    tokens.
    """
    total = stored_layout(codec, num_kv_heads, head_dim, dtype).bytes
    return total if codec.group is None else total / codec.group
