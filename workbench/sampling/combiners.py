"""Combine a row of logits with other logits of the same model: logits of earlier layers, or of a second stream.

    LayerCombiner    logits, and the logits of earlier layers (final norm and head applied to the states after them)
    StreamCombiner   logits, and the logits of a second stream: another prompt followed by the same output

Combiners are listed in `filters` and run before all filters, the built-in ones included, which treat their result as
the model's distribution. Each row is combined alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from workbench.custom import check_arity
from workbench.errors import WorkbenchError
from workbench.request import CustomPart
from workbench.sampling.filters import History


class LayerCombiner(Protocol):
    """A combiner with the logits of earlier layers. `layers` are the numbers of layers after which hidden states are
    taken; 0 is the embedding.

    It is called with logits [sample, vocab], a history for each sample, and early logits [layer, sample, vocab], in the
    order of `layers`; it returns logits [sample, vocab]."""

    layers: tuple[int, ...]

    def __call__(self, logits: Tensor, histories: Sequence[History], early: Tensor, /) -> Tensor: ...


class StreamCombiner(Protocol):
    """A combiner with the logits of a second stream. `second_prompt` maps a request's prompt to the prompt of its
    second stream.

    It is called with logits [sample, vocab], a history for each sample, and the second stream's logits [sample, vocab];
    it returns logits [sample, vocab]."""

    def second_prompt(self, prompt_ids: Sequence[int], /) -> Sequence[int]: ...

    def __call__(self, logits: Tensor, histories: Sequence[History], second: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class OtherLogits:
    """The other logits of one sequence, in float32 [row, vocab] each: `early` has those of earlier layers by number of
    layers, `second` those of the second stream.
    """

    early: Mapping[int, Tensor] = field(default_factory=dict)
    second: Tensor | None = None


NO_OTHERS = OtherLogits()


@dataclass(frozen=True)
class NamedCombiner:
    """A combiner with its path in the settings, for error messages."""

    path: str
    combine: LayerCombiner | StreamCombiner

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(getattr(self.combine, "layers", ()))

    @property
    def has_second_stream(self) -> bool:
        return hasattr(self.combine, "second_prompt")

    def second_prompt(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the second stream's prompt. Raises WorkbenchError if the combiner fails or does not return token
        ids.
        """
        try:
            ids = tuple(cast(StreamCombiner, self.combine).second_prompt(tuple(prompt_ids)))
        except Exception as error:
            raise WorkbenchError(f"filter {self.path}: second_prompt: {type(error).__name__}: {error}") from error
        if not ids or not all(type(token) is int for token in ids):
            raise WorkbenchError(f"filter {self.path}: second_prompt must return at least one token id, not {ids!r}")
        return ids

    def rows(self, logits: Tensor, histories: Sequence[History], others: OtherLogits) -> Tensor:
        """Return the combined logits of one sequence, [row, vocab].

        Raises:
            WorkbenchError: the part fails, or returns rows that no token can be sampled from.
        """
        if self.has_second_stream:
            other = others.second
        else:
            missing = [layer for layer in self.layers if layer not in others.early]
            other = None if missing else torch.stack([others.early[layer] for layer in self.layers])
        if other is None:
            what = "a second stream" if self.has_second_stream else f"logits of layers {self.layers}"
            raise WorkbenchError(f"filter {self.path}: needs {what}, which this call does not have")
        return torch.cat([
            self._row(logits[row : row + 1], history, other[..., row : row + 1, :])
            for row, history in enumerate(histories)
        ])  # fmt: skip

    def _row(self, logits: Tensor, history: History, other: Tensor) -> Tensor:
        try:
            combined: Any = self.combine(logits.clone(), [history], other.clone())
        except Exception as error:
            raise WorkbenchError(f"filter {self.path}: {type(error).__name__}: {error}") from error
        if not isinstance(combined, Tensor) or combined.shape != logits.shape or combined.dtype != logits.dtype:
            is_tensor = isinstance(combined, Tensor)
            returned = f"{tuple(combined.shape)} {combined.dtype}" if is_tensor else type(combined).__name__
            raise WorkbenchError(
                f"filter {self.path}: must return logits {tuple(logits.shape)} {logits.dtype}, not {returned}"
            )
        largest = combined.amax()
        if not bool(largest.isfinite()) and bool(logits.amax().isfinite()):
            raise WorkbenchError(f"filter {self.path}: its logits leave no token, or contain NaN or +inf")
        return combined


def combiner_of(made: Any, part: CustomPart) -> NamedCombiner | None:
    """Return `made` as a combiner if it has `layers` or `second_prompt`, else None. Raises WorkbenchError for an
    invalid combiner.
    """
    layers, has_stream = getattr(made, "layers", None), hasattr(made, "second_prompt")
    if layers is None and not has_stream:
        return None
    name = f"filter {part.path}"
    if layers is not None and has_stream:
        raise WorkbenchError(f"{name}: has both layers and second_prompt; give only one")
    if has_stream:
        check_arity(made.second_prompt, 1, f"{name}: second_prompt", "(prompt_ids)")
        check_arity(made, 3, name, "(logits, histories, second)")
    else:
        whole = isinstance(layers, tuple) and layers and all(type(layer) is int and layer >= 0 for layer in layers)
        if not whole:
            raise WorkbenchError(f"{name}: layers is {layers!r}; must be a tuple of layer numbers, from 0")
        check_arity(made, 3, name, "(logits, histories, early)")
    return NamedCombiner(part.path, made)
