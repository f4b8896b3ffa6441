"""Check laws of attention in a model: texts, batches, pages, chunks and prefixes.

Models compute in float64, so that only a broken law makes a difference.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

from workbench.model.transformer import Transformer
from workbench.oracle import naive
from workbench.testing.attention_scenarios import (
    CONTEXT,
    VOCAB,
    AttentionScenario,
    SampledLogits,
    require_equal_logits,
    sampled_logits,
)
from workbench.testing.law import LawBroken

Change = Mapping[str, Any]
ROUNDING = 1e-9


def _causal(change: Change, scenario: AttentionScenario) -> None:
    """Check that a changed end of a text leaves all earlier rows unchanged."""
    model, text = scenario.model(change), list(max(scenario.texts(), key=len))
    kept = 1 + scenario.seed % (len(text) - 1)
    other = text[:kept] + [(token + 1 + scenario.seed) % VOCAB for token in text[kept:]]
    first, second = (model.logits(ids)[:kept] for ids in (text, other))
    away = (first - second).abs().amax(-1)
    changed = (~(away <= ROUNDING * (1 + first.abs().max()))).nonzero()[:, 0].tolist()
    if changed:
        raise LawBroken(f"tokens from {kept} on change the logits of position {changed[0]} before them, on {scenario}")


def _batched(change: Change, scenario: AttentionScenario) -> None:
    model, texts = scenario.model(change), scenario.texts()
    together = sampled_logits(model, {f"{i}": text for i, text in enumerate(texts)})
    for i, text in enumerate(texts):
        require_equal_logits(
            sampled_logits(model, {f"{i}": text}),
            together,
            "in a batch with other texts it gives other rows than alone",
            scenario,
        )


def _paged(change: Change, scenario: AttentionScenario) -> None:
    model, texts = scenario.model(change), {f"{i}": text for i, text in enumerate(scenario.texts())}
    pages = len(texts) * -(-CONTEXT // scenario.page_size)
    shuffle = random.Random(scenario.seed)
    orders = tuple(shuffle.sample(range(1, pages + 1), pages) for _ in model.spec.kv_cache_groups)
    scattered = sampled_logits(model, texts, page_size=scenario.page_size, pages=pages, page_orders=orders)
    message = f"in pages of {scenario.page_size} tokens in random order it gives other rows than in one page"
    require_equal_logits(scattered, sampled_logits(model, texts), message, scenario)


def _chunked(change: Change, scenario: AttentionScenario) -> None:
    model, texts = scenario.model(change), {f"{i}": text for i, text in enumerate(scenario.texts())}
    chunked = sampled_logits(model, texts, max_num_batched_tokens=scenario.max_num_batched_tokens)
    message = f"in steps of {scenario.max_num_batched_tokens} tokens it gives other rows than at once"
    require_equal_logits(chunked, sampled_logits(model, texts), message, scenario)


def _warm(change: Change, scenario: AttentionScenario) -> None:
    """Check texts with a common prefix, one after another: later texts reuse pages of the first."""
    model, longest = scenario.model(change), max(scenario.texts(), key=len)
    ends = [(), (0,), (1, 0)]
    texts = {f"{i}": longest[: len(longest) - i] + end for i, end in enumerate(ends) if len(longest) > i}
    settings: dict[str, Any] = {
        "page_size": scenario.page_size,
        "max_num_seqs": 1,
        "max_num_batched_tokens": scenario.max_num_batched_tokens,
    }
    warm = sampled_logits(model, texts, prefix="radix", **settings)
    message = "on a prefix found in the cache it gives other rows than on one computed"
    require_equal_logits(warm, sampled_logits(model, texts, **settings), message, scenario)


def _plain(change: Change, scenario: AttentionScenario) -> None:
    model = scenario.model(change)
    texts = {f"{i}": text for i, text in enumerate(scenario.texts())}
    require_oracle_logits(model, sampled_logits(model, texts, page_size=scenario.page_size), ROUNDING, scenario)


def require_oracle_logits(
    model: Transformer, sampled: SampledLogits, rounding: float, scenario: AttentionScenario
) -> None:
    """Raise LawBroken if logits [vocab] are further than `rounding` from the oracle's, relative to its largest."""
    for tokens, row in sampled.values():
        right = naive.logits(model, torch.tensor(tokens))[-1]
        away = float((row - right).abs().max())
        if not away <= rounding * (1 + float(right.abs().max())):
            raise LawBroken(f"is {away:.2g} away from the oracle after {len(tokens)} tokens, on {scenario}")


LAWS: dict[str, Callable[[Change, AttentionScenario], None]] = {
    "causality: later tokens change no earlier row": _causal,
    "batched = alone": _batched,
    "pages of any size in any order = one page": _paged,
    "chunked = whole": _chunked,
    "a warm prefix = a cold one": _warm,
    "agrees with the oracle, which has no cache, no batch and no pages": _plain,
}
