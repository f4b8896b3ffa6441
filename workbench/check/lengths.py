"""Choose the lengths of the texts on which two models are compared: past each length at which a mechanism sets in, as
far as the model's context and the time allow."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.model.attention_spec import AttentionSpec
from workbench.model.rotary import rotaries_of_model
from workbench.model.spec import ModelSpec

SHORT_TOKENS = 47  # no number of heads, so that an axis of tokens and one of heads differ in length
GREEDY_TOKENS = 8  # that follow a text
TOKENS_PAST = 16  # of a text past the last length at which a mechanism sets in


@dataclass(frozen=True, order=True)
class Threshold:
    """The shortest text on which a mechanism changes something, in tokens."""

    tokens: int
    mechanism: str


def thresholds_of(spec: ModelSpec) -> tuple[Threshold, ...]:
    """Return the lengths within the model's context at which windows, chunks, attention temperatures and scalings of
    the rotary embedding set in, the shortest first."""
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
    """Return the lengths of the texts that every model is compared on: of a few tokens, and below the length at which
    angles depend on it."""
    usual = max(2, min(SHORT_TOKENS, spec.max_position_embeddings - GREEDY_TOKENS))
    scalings = [rotary.scaling for rotary, *_ in rotaries_of_model(spec)]
    below = [each.original_max_position_embeddings - GREEDY_TOKENS for each in scalings if each.by_length]
    return tuple(sorted({usual, *(_unlike_heads(spec, 2, each) for each in below if 2 <= each < usual)}))


def long_length(spec: ModelSpec, max_tokens: float) -> int | None:
    """Return the length of the text past as many thresholds as `max_tokens` tokens allow; None where the short ones are
    past them."""
    within = [each.tokens for each in thresholds_of(spec) if each.tokens <= max_tokens]
    if not within or within[-1] <= max(short_lengths(spec)):
        return None
    most = min(within[-1] + TOKENS_PAST, spec.max_position_embeddings - GREEDY_TOKENS)
    return _unlike_heads(spec, within[-1], most)


def _unlike_heads(spec: ModelSpec, least: int, most: int) -> int:
    """Return the highest length within these that is no number of heads."""
    heads = {getattr(kind.attention, name, 0) for kind in spec.layers for name in ("num_heads", "num_kv_heads")}
    return next((length for length in range(most, least - 1, -1) if length not in heads), most)
