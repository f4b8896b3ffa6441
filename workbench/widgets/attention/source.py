"""Sources of attention weights behind one protocol: a text computed whole, an inspection, plain arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from workbench.errors import WorkbenchError

MaskPredicate = Callable[[Any, Any], Any]  # positions of queries and keys that broadcast -> whether the query looks there


class AttentionSource(Protocol):
    """Attention weights of some layers. Rows are queries, in the order given; columns all positions of the text."""

    @property
    def positions(self) -> Sequence[int]:
        """Position in the text of each row."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Token ids of all columns; empty where only weights are known."""
        ...

    @property
    def columns(self) -> int: ...

    @property
    def layers(self) -> Sequence[int]: ...

    def num_heads(self, layer: int) -> int: ...

    def num_kv_heads(self, layer: int) -> int:
        """Number of KV heads; query heads that share one are neighbours."""
        ...

    def window_and_sinks(self, layer: int) -> tuple[int | None, int]:
        """Sliding window and number of sink tokens."""
        ...

    def read(self, layer: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Weights [head, row, column] of rows begin to end and whether they may be other than 0, [row, column] or for
        each head; columns that no row of these reaches may be left out."""
        ...


class ArrayAttentionSource:
    """Weights [head, row, column] by layer, of rows at `positions`. Without a `mask` what is 0 is taken as not seen."""

    def __init__(
        self,
        weights: Mapping[int, Any],
        positions: Sequence[int] | None = None,
        token_ids: Sequence[int] = (),
        num_kv_heads: Mapping[int, int] | None = None,
        windows_and_sinks: Mapping[int, tuple[int | None, int]] | None = None,
        masks: Mapping[int, MaskPredicate] | None = None,
    ):
        self._weights = {layer: np.asarray(each, dtype=np.float32) for layer, each in weights.items()}
        if not self._weights:
            raise WorkbenchError("AttentionView: no layer's weights were given; inspect with layers=None for all")
        shapes = {each.shape[1:] for each in self._weights.values()}
        if len(shapes) > 1 or any(each.ndim != 3 or not each.size for each in self._weights.values()):
            message = ", ".join(str(each.shape) for each in self._weights.values())
            raise WorkbenchError(f"AttentionView: weights are [layer, head, row, context], no side empty, not {message}")
        rows, self.columns = shapes.pop()
        self.layers = tuple(self._weights)
        self.positions = tuple(range(self.columns - rows, self.columns)) if positions is None else tuple(positions)
        self.token_ids = tuple(token_ids)
        if len(self.positions) != rows or len(self.token_ids) not in (0, self.columns):
            message = f"{len(self.positions)} positions and {len(self.token_ids)} tokens"
            raise WorkbenchError(f"AttentionView: {message} for weights of {rows} rows over {self.columns} tokens")
        self._num_kv_heads, self._windows_and_sinks, self._masks = num_kv_heads or {}, windows_and_sinks or {}, masks or {}

    def num_heads(self, layer: int) -> int:
        return len(self._weights[layer])

    def num_kv_heads(self, layer: int) -> int:
        return self._num_kv_heads.get(layer, self.num_heads(layer))

    def window_and_sinks(self, layer: int) -> tuple[int | None, int]:
        return self._windows_and_sinks.get(layer, (None, 0))

    def read(self, layer: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        weights = self._weights[layer][:, begin:end]
        mask = self._masks.get(layer)
        if mask is None:
            return weights, weights > 0
        return weights, mask_cells(mask, self.positions[begin:end], self.columns)


class ComputedAttentionSource:
    """Weights of a `WholeText`, every position a row; more come as it is extended."""

    def __init__(self, text: Any):
        self.text = text
        self._attention = [kind.attention for kind in text.model.spec.layers]
        self.layers = tuple(range(len(self._attention)))

    @property
    def token_ids(self) -> Sequence[int]:
        return self.text.token_ids

    @property
    def columns(self) -> int:
        return len(self.text.token_ids)

    @property
    def positions(self) -> Sequence[int]:
        return range(self.columns)

    def num_heads(self, layer: int) -> int:
        return self._attention[layer].heads

    def num_kv_heads(self, layer: int) -> int:
        return getattr(self._attention[layer], "num_kv_heads", 1)

    def window_and_sinks(self, layer: int) -> tuple[int | None, int]:
        return self._attention[layer].window, self._attention[layer].sinks

    def read(self, layer: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        weights = self.text.weights(layer, range(begin, end)).cpu().numpy()
        return weights, mask_cells(self.text.mask(layer), range(begin, end), end)


def source_of_inspection(found: Any, spec: Any) -> ArrayAttentionSource:
    """An `Inspection` of a request; without a model's `spec` its groups and masks are not known."""
    known: dict[str, Any] = {}
    if spec is not None:
        from workbench.model.own_parts import build_mask

        attention = {layer: spec.layers[layer].attention for layer in found.weights}
        # Heads may have been chosen: which of them share a group is known only where all are there.
        whole = {n: a for n, a in attention.items() if a.heads == len(found.weights[n])}
        known = {
            "groups": {n: getattr(a, "num_kv_heads", 1) for n, a in whole.items()},
            "bands": {n: (a.window, a.sinks) for n, a in attention.items()},
            "masks": {n: build_mask(a) for n, a in attention.items()},
        }
    weights = {n: each.cpu().numpy() for n, each in found.weights.items()}
    return ArrayAttentionSource(weights, found.rows, found.token_ids, **known)


def mask_cells(mask: MaskPredicate, positions: Sequence[int], columns: int) -> np.ndarray:
    """The predicate as cells [row, column]; no row sees what comes after it."""
    import torch

    query, key = torch.tensor(list(positions), dtype=torch.long)[:, None], torch.arange(columns)[None]
    return ((key <= query) & mask(query, key)).expand(len(query), columns).numpy()
