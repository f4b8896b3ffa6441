"""Laws of attention in a model: texts, batches, pages, chunks and prefixes.

Models compute in float64, so that only a broken law makes a difference.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

from workbench.engine import naive
from workbench.testing.attention_scenes import CONTEXT, VOCAB, Scene, must_agree, rows_of
from workbench.testing.report import Broken

Change = Mapping[str, Any]
ROUNDING = 1e-9


def _causal(change: Change, scene: Scene) -> None:
    """Check that another ending leaves all rows before it unchanged."""
    model, text = scene.model(change), list(max(scene.texts(), key=len))
    kept = 1 + scene.seed % (len(text) - 1)
    other = text[:kept] + [(token + 1 + scene.seed) % VOCAB for token in text[kept:]]
    first, second = (model.logits(ids)[:kept] for ids in (text, other))
    away = (first - second).abs().amax(-1)
    changed = (~(away <= ROUNDING * (1 + first.abs().max()))).nonzero()[:, 0].tolist()
    if changed:
        raise Broken(f"tokens from {kept} on change the logits of position {changed[0]} before them, on {scene}")


def _batched(change: Change, scene: Scene) -> None:
    model, texts = scene.model(change), scene.texts()
    together = rows_of(model, {f"{i}": text for i, text in enumerate(texts)})
    for i, text in enumerate(texts):
        must_agree(rows_of(model, {f"{i}": text}), together, "beside other texts it gives other rows than alone", scene)


def _paged(change: Change, scene: Scene) -> None:
    model, texts = scene.model(change), {f"{i}": text for i, text in enumerate(scene.texts())}
    pages = len(texts) * -(-CONTEXT // scene.page_size)
    shuffle = random.Random(scene.seed)
    orders = tuple(shuffle.sample(range(1, pages + 1), pages) for _ in model.spec.layer_groups)
    scattered = rows_of(model, texts, page_size=scene.page_size, pages=pages, page_orders=orders)
    told = f"in pages of {scene.page_size} tokens in random order it gives other rows than in one page"
    must_agree(scattered, rows_of(model, texts), told, scene)


def _chunked(change: Change, scene: Scene) -> None:
    model, texts = scene.model(change), {f"{i}": text for i, text in enumerate(scene.texts())}
    chunked = rows_of(model, texts, max_num_batched_tokens=scene.budget)
    told = f"in steps of {scene.budget} tokens it gives other rows than at once"
    must_agree(chunked, rows_of(model, texts), told, scene)


def _warm(change: Change, scene: Scene) -> None:
    """Check texts with a common beginning, one after another: later ones reuse pages of the first."""
    model, longest = scene.model(change), max(scene.texts(), key=len)
    ends = [(), (0,), (1, 0)]
    texts = {f"{i}": longest[: len(longest) - i] + end for i, end in enumerate(ends) if len(longest) > i}
    settings = {"page_size": scene.page_size, "max_num_seqs": 1, "max_num_batched_tokens": scene.budget}
    warm = rows_of(model, texts, prefix="radix", **settings)
    told = "on a prefix found in the cache it gives other rows than on one computed"
    must_agree(warm, rows_of(model, texts, **settings), told, scene)


def _plain(change: Change, scene: Scene) -> None:
    model = scene.model(change)
    texts = {f"{i}": text for i, text in enumerate(scene.texts())}
    for tokens, row in rows_of(model, texts, page_size=scene.page_size).values():
        right = naive.logits(model, torch.tensor(tokens))[-1]
        away = float((row - right).abs().max())
        if not away <= ROUNDING * (1 + float(right.abs().max())):
            raise Broken(f"is {away:.2g} away from the oracle after {len(tokens)} tokens, on {scene}")


LAWS: dict[str, Callable[[Change, Scene], None]] = {
    "causality: what comes later changes nothing before it": _causal,
    "batched = alone": _batched,
    "pages of any size in any order = one page": _paged,
    "chunked = whole": _chunked,
    "a warm prefix = a cold one": _warm,
    "agrees with the oracle, which has no cache, no batch and no pages": _plain,
}
