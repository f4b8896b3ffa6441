"""Runners of several kinds, by name."""

from __future__ import annotations

from typing import Any

from tests.engine.guesses import model_drafts
from tests.engine.tiny import CONTEXT, layer, model_of, runner_of, spec_of
from workbench.kv_cache.format import CacheFormat
from workbench.speculative.proposers import PromptLookupProposer, Speculator

MODEL = model_of(spec_of(layer(), layer(2, 1, sliding_window=9)))
PLAIN = model_of(spec_of(layer(dim=8), layer(dim=8)))
PACKED = CacheFormat(format="int8", quant_group=8, columns=8, residual_length=8)
HOST = {"kind": "memory", "bytes": 2**16}


def drafts(proposer: Any) -> Speculator:
    return Speculator(proposer, 3, CONTEXT, "adaptive")


KINDS: dict[str, Any] = {
    "plain": lambda: runner_of(MODEL),
    "few pages, saved on the host": lambda: runner_of(MODEL, pages=22, prefix="radix", offload=HOST),
    "packed": lambda: runner_of(PLAIN, cache=PACKED, page_size=8),
    "evicting": lambda: runner_of(PLAIN, evict={"kind": "heavy_hitters", "budget": 12}, pages=11, offload=HOST),
    "lookup": lambda: runner_of(MODEL, speculator=drafts(PromptLookupProposer(1, 3))),
    "draft model": lambda: runner_of(MODEL, speculator=drafts(model_drafts(runner_of(PLAIN)))),
}
