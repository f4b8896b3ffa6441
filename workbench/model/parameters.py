"""Parameters as stored: the tensors of a checkpoint that each is made of, and the order of their axes and rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor


class Layout(Protocol):
    """A change of order between a stored tensor and ours, which can be read either way."""

    def from_stored(self, tensor: Tensor) -> Tensor: ...

    def to_stored(self, tensor: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class AxisLayout:
    """The order of a stored tensor's axes and of ours: two sides of an einops pattern."""

    stored_axes: str
    axes_here: str
    axes: tuple[tuple[str, int], ...] = ()

    def from_stored(self, tensor: Tensor) -> Tensor:
        return rearrange(tensor, f"{self.stored_axes} -> {self.axes_here}", **dict(self.axes))

    def to_stored(self, tensor: Tensor) -> Tensor:
        return rearrange(tensor, f"{self.axes_here} -> {self.stored_axes}", **dict(self.axes))


@dataclass(frozen=True)
class RowLayout:
    """For each row here its row in the stored tensor, which may be transposed."""

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
    """Two layouts, one after the other; the second may be none."""

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
    """One stored tensor, under its name in the checkpoint. A parameter is its parts, stacked along rows."""

    name: str
    shape: tuple[int, ...]
    layout: Layout | None = None

    @property
    def shape_here(self) -> tuple[int, ...]:
        """Return the shape it has among our parameters."""
        if self.layout is None:
            return self.shape
        return tuple(self.layout.from_stored(torch.empty(self.shape, device="meta")).shape)


@dataclass(frozen=True)
class StoredParameter:
    """A parameter's parts, and its shape where that is another than of the stacked parts."""

    parts: tuple[StoredPart, ...]
    viewed_as: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.viewed_as is not None:
            return self.viewed_as
        shapes = [part.shape_here for part in self.parts]
        return sum(shape[0] for shape in shapes), *shapes[0][1:]

    def to_stored(self, tensor: Tensor) -> Iterator[tuple[StoredPart, Tensor]]:
        """Yield each part with its rows of the parameter, or of codes or scales row by row, in the stored order."""
        rows = [part.shape_here[0] for part in self.parts]
        if self.viewed_as is not None:
            tensor = tensor.reshape(sum(rows), *self.parts[0].shape_here[1:])
        for part, own in zip(self.parts, tensor.split(rows), strict=True):
            yield part, own if part.layout is None else part.layout.to_stored(own)


Named = Iterator[tuple[str, StoredParameter]]  # a parameter of ours, by its name


def whole(name: str, *shape: int) -> StoredParameter:
    return StoredParameter((StoredPart(name, shape),))


def linear(ours: str, rows: dict[str, int], columns: int, bias: bool = False, transposed: bool = False) -> Named:
    """Yield the matrix and bias of a product whose stored tensors have so many rows."""
    parts = []
    for name, size in rows.items():
        shape, layout = ((columns, size), TRANSPOSED) if transposed else ((size, columns), None)
        parts.append(StoredPart(f"{name}.weight", shape, layout))
    yield f"{ours}.weight", StoredParameter(tuple(parts))
    if bias:
        yield f"{ours}.bias", StoredParameter(tuple(StoredPart(f"{n}.bias", (size,)) for n, size in rows.items()))


def chosen_rows(ours: str, rows: dict[str, list[int]], columns: int, bias: bool, transposed: bool) -> Named:
    """Yield the matrix and bias of a product whose rows are these rows of stored tensors."""
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
