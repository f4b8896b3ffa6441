"""Choose the lengths of the texts for comparing two models: past each length at which a mechanism sets in, within the
model's context and the time limit."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.model.attention_spec import AttentionSpec
from workbench.model.rotary import rotaries_of_model
from workbench.model.spec import ModelSpec

SHORT_TOKENS = 47  # differs from numbers of heads, to tell a token axis from a head axis
GREEDY_TOKENS = 8  # generated after a text
TOKENS_PAST = 16  # tokens past the last length at which a mechanism sets in


@dataclass(frozen=True, order=True)
class Threshold:
    """The shortest text length, in tokens, at which a mechanism has an effect."""

    tokens: int
    mechanism: str


def thresholds_of(spec: ModelSpec) -> tuple[Threshold, ...]:
    """Return the lengths, within the model's context, from which windows, chunks, attention temperatures and rotary
    scalings have an effect, in ascending order."""
    found = set()
    for kind in spec.layers:
        attention = kind.attention
        if not isinstance(attention, AttentionSpec):
            continue
        if attention.sliding_window is not None:
            found.add(Threshold(attention.sliding_window + 1, f"the window of {attention.sliding_window:,} tokens"))
        if attention.chunk_size is not None:
            found.add(Threshold(attention.chunk_size + 1, f"chunks of {attention.chunk_size:,} tokens"))
        if (heat := attention.temperature) is not None:
            found.add(Threshold(max(1, heat.floor - heat.offset + 1), "the attention temperature"))
    for rotary, *_ in rotaries_of_model(spec):
        if rotary.scaling.by_length:
            original = rotary.scaling.original_max_position_embeddings
            found.add(Threshold(original + 1, f"{rotary.scaling.kind} scaling beyond {original:,} tokens"))
    return tuple(sorted(each for each in found if each.tokens <= spec.max_position_embeddings - GREEDY_TOKENS))


def short_lengths(spec: ModelSpec) -> tuple[int, ...]:
    """Return the lengths of the texts for every model: a few tokens, and just below the length at which rotary angles
    change."""
    usual = max(2, min(SHORT_TOKENS, spec.max_position_embeddings - GREEDY_TOKENS))
    scalings = [rotary.scaling for rotary, *_ in rotaries_of_model(spec)]
    below = [each.original_max_position_embeddings - GREEDY_TOKENS for each in scalings if each.by_length]
    return tuple(sorted({usual, *(_unlike_heads(spec, 2, each) for each in below if 2 <= each < usual)}))


def long_length(spec: ModelSpec, max_tokens: float) -> int | None:
    """Return the length of one longer text that passes as many thresholds as `max_tokens` allows; None if the short
    texts pass them all."""
    within = [each.tokens for each in thresholds_of(spec) if each.tokens <= max_tokens]
    if not within or within[-1] <= max(short_lengths(spec)):
        return None
    most = min(within[-1] + TOKENS_PAST, spec.max_position_embeddings - GREEDY_TOKENS)
    return _unlike_heads(spec, within[-1], most)


def _unlike_heads(spec: ModelSpec, least: int, most: int) -> int:
    """Return the highest length from `least` to `most` that differs from all numbers of heads."""
    heads = {getattr(kind.attention, name, 0) for kind in spec.layers for name in ("num_heads", "num_kv_heads")}
    return next((length for length in range(most, least - 1, -1) if length not in heads), most)
