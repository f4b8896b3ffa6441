"""The values that operators of attention take beside queries and pages, and the flat form torch's schemas want."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from compiled_kernels.backends import BackendError, describe_callable
from compiled_kernels.masks import Causal, Mask, SlidingWindow, window_and_sinks
from compiled_kernels.scores import ALiBi, Score, uses_alibi


class AttentionParameters(NamedTuple):
    """A layer's attention, as a rule over scores.

    Attributes:
        scale: factor of the scores.
        mask: predicate over (query, key) positions.
        softcap: c > 0 makes every score c tanh(score / c) (Gemma 2, 2024).
        sink_logits: one logit a head in the softmax's sum that attends to nothing (gpt-oss, 2025).
        score: changes each score after the cap (see scores.py).
    """

    scale: float
    mask: Mask = Causal()
    softcap: float = 0.0
    sink_logits: Float[Tensor, " head"] | None = None
    score: Score | None = None

    def window_and_sinks(self, operator: str, backend: str) -> tuple[int, int]:
        """Return (window, sinks) of the mask for a kernel written by hand. Raises BackendError for any other mask, and
        for score functions: the kernel cannot carry them out."""
        if self.score is not None:
            words = f"backend {backend} knows no score functions, not {describe_callable(self.score)}"
            raise BackendError(f"{operator}: {words}")
        return window_and_sinks(self.mask, backend)


class Spans(NamedTuple):
    """The spans of a step, packed: sequence s owns the rows [starts[s], starts[s + 1]), the last of its
    `context_lengths[s]` positions. `decode_only` promises that every span has one token."""

    starts: Int[Tensor, " seq_plus_one"]
    context_lengths: Int[Tensor, " seq"]
    decode_only: bool = False

    def listed(self) -> list[tuple[int, slice, int]]:
        """Return (sequence, its rows, its context length) of each span."""
        starts, lengths = self.starts.tolist(), self.context_lengths.tolist()
        return [(seq, slice(starts[seq], starts[seq + 1]), context) for seq, context in enumerate(lengths)]

    def decodes_and_longer(self) -> tuple[int, list[tuple[int, slice, int]]]:
        """Return how many spans of one token come first, and the other spans, but for empty ones."""
        listed = self.listed()
        decodes = next((seq for seq, rows, _ in listed if rows.stop - rows.start != 1), len(listed))
        return decodes, [span for span in listed[decodes:] if span[1].start < span[1].stop]


# Behind an operator's own tensors; graphs hold flat tensors and numbers only.
SCHEMA = (
    "Tensor span_starts, Tensor context_lengths, bool decode_only,"
    " float scale, int window, int sinks, float softcap, Tensor? sink_logits, bool alibi"
)


def flatten(spans: Spans, parameters: AttentionParameters, backend: str) -> tuple[Any, ...]:
    """Return both as `SCHEMA` lists them. Raises BackendError for masks and score functions that it has no word for."""
    seen = window_and_sinks(parameters.mask, backend)
    scored = parameters.softcap, parameters.sink_logits, uses_alibi(parameters.score, backend)
    return *spans, parameters.scale, *seen, *scored


def unflatten(
    num_heads: int,
    starts: Tensor,
    lengths: Tensor,
    decode_only: bool,
    scale: float,
    window: int,
    sinks: int,
    *scored: Any,
) -> tuple[Spans, AttentionParameters]:
    """Undo `flatten`."""
    mask, (softcap, sink_logits, alibi) = SlidingWindow(window, sinks) if window else Causal(), scored
    parameters = AttentionParameters(scale, mask, softcap, sink_logits, ALiBi(num_heads) if alibi else None)
    return Spans(starts, lengths, decode_only), parameters
