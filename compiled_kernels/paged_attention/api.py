"""Attention of packed spans over keys and values that lie in pages."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compiled_kernels.backends import Backend, BackendError, describe_callable
from compiled_kernels.masks import Mask, window_and_sinks
from compiled_kernels.operators import define_operator
from compiled_kernels.paged_attention.inductor import by_spans, decode_attention
from compiled_kernels.paged_attention.reference import reference
from compiled_kernels.scores import Score, uses_alibi

PAGED_ATTENTION = define_operator(
    "paged_attention",
    "(Tensor q, Tensor keys, Tensor values, Tensor page_table, Tensor span_starts, Tensor context_lengths, float scale,"
    " int window, int sinks, bool decode_only, float softcap, Tensor? sink_logits, bool alibi) -> Tensor",
    lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format),
    {
        Backend.EAGER: "compiled_kernels.paged_attention.inductor:eager_form",
        Backend.INDUCTOR: "compiled_kernels.paged_attention.inductor:inductor_form",
        Backend.TRITON: "compiled_kernels.paged_attention.triton:paged_attention",
        Backend.MLIR: "compiled_kernels.paged_attention.mlir:paged_attention",
    },
)


def paged_attention(
    q: Float[Tensor, "token head dim"],
    keys: Float[Tensor, "page group offset dim"],
    values: Float[Tensor, "page group offset dim"],
    page_table: Int[Tensor, "seq held"],
    span_starts: Int[Tensor, " seq_plus_one"],
    context_lengths: Int[Tensor, " seq"],
    scale: float,
    mask: Mask,
    decode_only: bool,
    backend: Backend = Backend.EAGER,
    softcap: float = 0.0,
    sink_logits: Float[Tensor, " head"] | None = None,
    score: Score | None = None,
) -> Float[Tensor, "token head dim"]:
    """Compute softmax(scale q kᵀ) v for each query head over the context of its key/value head, in float32.

    Sequence s owns the tokens [span_starts[s], span_starts[s + 1]), the last of its `context_lengths[s]` positions.
    Position p lies in page `page_table[s, p // offset]`. Memory beyond a sequence's length is never read into a
    result. A row that sees no key gives zeros, as does one of no sequence: spans begin with row 0 and leave none out,
    so such rows come after the last span.

    Args:
        q: queries of all spans, packed.
        keys: the pool of key pages.
        values: the pool of value pages.
        page_table: page numbers of each sequence, page 0 is null.
        span_starts: first token of each sequence, and the end of the last.
        context_lengths: positions of each sequence, its span included.
        scale: factor of the scores.
        mask: predicate over (query, key) positions.
        decode_only: promise that every span has one token.
        backend: the backend.
        softcap: c > 0 makes every score c tanh(score / c) (Gemma 2, 2024).
        sink_logits: one logit a head in the softmax's sum that attends to nothing (gpt-oss, 2025).
        score: changes each score after the cap (see scores.py).

    Returns:
        Weighted sums of values in the type of `q`.

    Raises:
        BackendError: for what the backend cannot express: triton and mlir know windows with sinks, no score functions.
    """
    rule = scale, mask, softcap, sink_logits, score
    if backend is Backend.INDUCTOR and decode_only:
        return decode_attention(q, keys, values, page_table, context_lengths, *rule)
    if backend is Backend.INDUCTOR and not torch.compiler.is_compiling():
        return by_spans(q, keys, values, page_table, span_starts, context_lengths, *rule)
    if backend is Backend.EAGER and not torch.compiler.is_compiling():
        return reference(q, keys, values, page_table, span_starts, context_lengths, *rule)
    # Walking spans reads their lengths, which no graph can: inside one, these backends are opaque too.
    (window, sinks), alibi = _sayable(backend, mask, score)
    cache = keys, values, page_table, span_starts, context_lengths
    return PAGED_ATTENTION.implementation(backend)(
        q, *cache, scale, window, sinks, decode_only, softcap, sink_logits, alibi
    )


def unsupported_reason(backend: Backend, mask: Mask, score: Score | None) -> str | None:
    """Return why a backend cannot carry out this mask and score function; None where it can."""
    if backend in (Backend.EAGER, Backend.INDUCTOR):
        return None
    try:
        _sayable(backend, mask, score)
    except BackendError as error:
        return str(error)
    return None


def _sayable(backend: Backend, mask: Mask, score: Score | None) -> tuple[tuple[int, int], bool]:
    if backend in (Backend.TRITON, Backend.MLIR) and score is not None:
        raise BackendError(
            f"paged_attention: backend {backend} knows no score functions, not {describe_callable(score)}"
        )
    return window_and_sinks(mask, backend), uses_alibi(score, backend)
