"""Combine a row of logits with other logits of the same model: those of earlier layers, or of a second stream.

    LayerCombiner    logits, and those that the final norm and the head give for the states after some earlier layers
    StreamCombiner   logits, and those after another prompt that is followed by the same output: a second stream

They are named among `filters` and are called before all others, the built-in ones too, as what they return is the
model's distribution for these. Each row is combined alone.
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
    """`layers` are numbers of layers: the states after so many, from 0, the embedding.

    It is called with logits [sample, vocab], a history for each sample, and early logits [layer, sample, vocab], in the
    order of `layers`; it returns logits [sample, vocab]."""

    layers: tuple[int, ...]

    def __call__(self, logits: Tensor, histories: Sequence[History], early: Tensor, /) -> Tensor: ...


class StreamCombiner(Protocol):
    """`second_prompt` returns the prompt of the second stream for a request's own.

    It is called with logits [sample, vocab], a history for each sample, and the second stream's logits [sample, vocab];
    it returns logits [sample, vocab]."""

    def second_prompt(self, prompt_ids: Sequence[int], /) -> Sequence[int]: ...

    def __call__(self, logits: Tensor, histories: Sequence[History], second: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class OtherLogits:
    """The other logits of one sequence: `early` by number of layers, and `second`; [row, vocab] each, float32."""

    early: Mapping[int, Tensor] = field(default_factory=dict)
    second: Tensor | None = None


NO_OTHERS = OtherLogits()


@dataclass(frozen=True)
class NamedCombiner:
    """A combiner with its path in the settings."""

    path: str
    combine: LayerCombiner | StreamCombiner

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(getattr(self.combine, "layers", ()))

    @property
    def has_second_stream(self) -> bool:
        return hasattr(self.combine, "second_prompt")

    def second_prompt(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the second stream's prompt. WorkbenchError where the part fails or gives anything but token ids."""
        try:
            ids = tuple(cast(StreamCombiner, self.combine).second_prompt(tuple(prompt_ids)))
        except Exception as error:
            raise WorkbenchError(f"filter {self.path}: second_prompt: {type(error).__name__}: {error}") from error
        if not ids or not all(type(token) is int for token in ids):
            raise WorkbenchError(f"filter {self.path}: second_prompt must return at least one token id, not {ids!r}")
        return ids

    def rows(self, logits: Tensor, histories: Sequence[History], others: OtherLogits) -> Tensor:
        """Return the combined rows of one sequence, [row, vocab].

        Raises:
            WorkbenchError: the part fails, or returns what no token can be sampled from.
        """
        if self.has_second_stream:
            other = others.second
        else:
            missing = [layer for layer in self.layers if layer not in others.early]
            other = None if missing else torch.stack([others.early[layer] for layer in self.layers])
        if other is None:
            what = "a second stream" if self.has_second_stream else f"logits of layers {self.layers}"
            raise WorkbenchError(f"filter {self.path}: needs {what}, which there are not here")
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
    """Return the part as a combiner if it has `layers` or `second_prompt`, or None. WorkbenchError for a wrong one."""
    layers, has_stream = getattr(made, "layers", None), hasattr(made, "second_prompt")
    if layers is None and not has_stream:
        return None
    name = f"filter {part.path}"
    if layers is not None and has_stream:
        raise WorkbenchError(f"{name}: has layers and second_prompt; a part combines one or the other")
    if has_stream:
        check_arity(made.second_prompt, 1, f"{name}: second_prompt", "(prompt_ids)")
        check_arity(made, 3, name, "(logits, histories, second)")
    else:
        whole = isinstance(layers, tuple) and layers and all(type(layer) is int and layer >= 0 for layer in layers)
        if not whole:
            raise WorkbenchError(f"{name}: layers is {layers!r}; must be a tuple of numbers of layers, from 0")
        check_arity(made, 3, name, "(logits, histories, early)")
    return NamedCombiner(part.path, made)
