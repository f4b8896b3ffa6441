"""Describe stored parameters: the checkpoint tensors of each parameter, and the order of their axes and rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor


class Layout(Protocol):
    """An invertible reordering between a tensor as a checkpoint stores it and as we store it."""

    def from_stored(self, tensor: Tensor) -> Tensor: ...

    def to_stored(self, tensor: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class AxisLayout:
    """A layout that reorders axes: the two sides of an einops pattern, for the stored tensor and for ours."""

    stored_axes: str
    axes_here: str
    axes: tuple[tuple[str, int], ...] = ()

    def from_stored(self, tensor: Tensor) -> Tensor:
        return rearrange(tensor, f"{self.stored_axes} -> {self.axes_here}", **dict(self.axes))

    def to_stored(self, tensor: Tensor) -> Tensor:
        return rearrange(tensor, f"{self.axes_here} -> {self.stored_axes}", **dict(self.axes))


@dataclass(frozen=True)
class RowLayout:
    """A layout that reorders rows: `rows` has, for each of our rows, its index in the stored tensor, which may be
    transposed.
    """

    rows: tuple[int, ...]
    transposed: bool = False

    def from_stored(self, tensor: Tensor) -> Tensor:
        tensor = tensor.T if self.transposed else tensor
        return tensor if tensor.is_meta else tensor[torch.tensor(self.rows)]

    def to_stored(self, tensor: Tensor) -> Tensor:
        stored = tensor[torch.tensor(self.rows).argsort()]
        return stored.T if self.transposed else stored


@dataclass(frozen=True)
class ChainedLayouts:
    """Two layouts, applied one after the other; the second may be None."""

    first: Layout
    second: Layout | None

    def from_stored(self, tensor: Tensor) -> Tensor:
        tensor = self.first.from_stored(tensor)
        return tensor if self.second is None else self.second.from_stored(tensor)

    def to_stored(self, tensor: Tensor) -> Tensor:
        return self.first.to_stored(tensor if self.second is None else self.second.to_stored(tensor))


TRANSPOSED = AxisLayout("column row", "row column")


@dataclass(frozen=True)
class StoredPart:
    """One stored tensor of a parameter, under its name in the checkpoint. A parameter is its parts, stacked along
    rows.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout | None = None

    @property
    def shape_here(self) -> tuple[int, ...]:
        """Return the shape that the part has in our parameter."""
        if self.layout is None:
            return self.shape
        return tuple(self.layout.from_stored(torch.empty(self.shape, device="meta")).shape)


@dataclass(frozen=True)
class StoredParameter:
    """The stored parts of a parameter, and the parameter's shape if it differs from the shape of the stacked parts."""

    parts: tuple[StoredPart, ...]
    viewed_as: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.viewed_as is not None:
            return self.viewed_as
        shapes = [part.shape_here for part in self.parts]
        return sum(shape[0] for shape in shapes), *shapes[0][1:]

    def to_stored(self, tensor: Tensor) -> Iterator[tuple[StoredPart, Tensor]]:
        """Yield each part with its rows of `tensor` (the parameter, its codes or its scales), in the stored order."""
        rows = [part.shape_here[0] for part in self.parts]
        if self.viewed_as is not None:
            tensor = tensor.reshape(sum(rows), *self.parts[0].shape_here[1:])
        for part, own in zip(self.parts, tensor.split(rows), strict=True):
            yield part, own if part.layout is None else part.layout.to_stored(own)


Named = Iterator[tuple[str, StoredParameter]]  # a parameter of ours, by its name


def whole(name: str, *shape: int) -> StoredParameter:
    return StoredParameter((StoredPart(name, shape),))


def linear(ours: str, rows: dict[str, int], columns: int, bias: bool = False, transposed: bool = False) -> Named:
    """Yield the matrix and the bias of a linear product; `rows` has the number of rows of each stored tensor."""
    parts = []
    for name, size in rows.items():
        shape, layout = ((columns, size), TRANSPOSED) if transposed else ((size, columns), None)
        parts.append(StoredPart(f"{name}.weight", shape, layout))
    yield f"{ours}.weight", StoredParameter(tuple(parts))
    if bias:
        yield f"{ours}.bias", StoredParameter(tuple(StoredPart(f"{n}.bias", (size,)) for n, size in rows.items()))


def chosen_rows(ours: str, rows: dict[str, list[int]], columns: int, bias: bool, transposed: bool) -> Named:
    """Yield the matrix and the bias of a linear product; `rows` has, for each stored tensor, the indices of the rows
    that it takes.
    """
    parts, biases = [], []
    for name, order in rows.items():
        size = len(order)
        parts.append(
            StoredPart(
                f"{name}.weight", (columns, size) if transposed else (size, columns), row_layout(order, transposed)
            )
        )
        biases.append(StoredPart(f"{name}.bias", (size,), row_layout(order, False)))
    yield f"{ours}.weight", StoredParameter(tuple(parts))
    if bias:
        yield f"{ours}.bias", StoredParameter(tuple(biases))


def row_layout(order: list[int], transposed: bool) -> Layout | None:
    if order == list(range(len(order))):
        return TRANSPOSED if transposed else None
    return RowLayout(tuple(order), transposed)
