"""The kit for eviction: what it says of our policies, of broken ones, and of an engine that does them wrongly."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.executors import evicting, packing
from workbench.executors.evicting import Evictor
from workbench.kv_cache.budget import EvictionBudget
from workbench.kv_cache.eviction import FULL_ATTENTION_LAW, PREFIX_LAW, parse_eviction
from workbench.kv_cache.manager import KVCacheManager
from workbench.testing import check_evict, eviction
from workbench.testing.law import check_law

HEAVY = {"kind": "heavy_hitters", "budget": 64}
SNAP = {"kind": "snapkv", "budget": 64, "observe": 3, "pool": 3}
ORACLE = "what stays is what a model without pages, batches and chunks keeps, head by head"
KEPT = "the budget is kept at every step, in tokens, pages and bytes; all pages are freed"


def breaks(law: str, policy: dict, examples: int = 2) -> bool:
    """Return True if the kit finds this law broken."""
    evict = parse_eviction(policy)
    assert evict is not None
    check = functools.partial(eviction.EVICTION_LAWS[law], evict)
    return not check_law(law, check, examples, eviction.eviction_scenarios()).ok


@pytest.mark.parametrize(("policy", "examples"), [(HEAVY, 2), (SNAP, 2), ({"kind": "window", "ratio": 0.5}, 1)])
def test_our_policies_keep_every_law(policy: dict, examples: int) -> None:
    report = check_evict(policy, examples)
    assert report.passed and len(report.laws) == 10, str(report)


@dataclass(frozen=True)
class Own:
    """A policy of the user's own; `wrong` says what is the matter with it."""

    wrong: str = ""
    gives_up: frozenset[str] = frozenset({PREFIX_LAW, FULL_ATTENTION_LAW})
    observes: int | None = None

    def budget_for(self, page_size: int, page_bytes: int) -> EvictionBudget:
        return EvictionBudget(20)

    def select(self, mass: Tensor, budget: int) -> Tensor:
        slots = len(mass)
        if slots <= budget:
            return torch.arange(slots)
        if self.wrong == "oldest":
            return torch.arange(budget)
        if self.wrong == "one more":
            return torch.arange(slots - budget - 1, slots)
        return torch.arange(slots - budget, slots)


def test_the_fault_of_a_custom_policy_is_named() -> None:
    assert check_evict(Own(), examples=1).passed
    assert "the newest is not among them" in str(check_evict(Own("oldest"), examples=1))
    assert "keeps 2 of 2 tokens with a budget of 1" in str(check_evict(Own("one more"), examples=1))


def test_a_law_that_is_given_up_is_not_tried() -> None:
    report = check_evict(replace(Own(), gives_up=frozenset({PREFIX_LAW, "chunked = whole"})), examples=1)
    assert ("chunked = whole", True, "given up", False) in report.laws


def _nothing_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Evictor, "add_mass", lambda *_: None)


def _positions_as_slots(patch: pytest.MonkeyPatch) -> None:
    """Context lengths and slots as if nothing had been evicted."""
    own = packing.pack_batch

    def pack(plan, *rest):
        evicted = [span.sequence.num_evicted_tokens for span in plan.spans]
        for span in plan.spans:
            span.sequence.num_evicted_tokens = 0
        try:
            return own(plan, *rest)
        finally:
            for span, count in zip(plan.spans, evicted, strict=True):
                span.sequence.num_evicted_tokens = count

    patch.setattr("workbench.executors.base.pack_batch", pack)


def _moved_the_wrong_way_round(patch: pytest.MonkeyPatch) -> None:
    own = evicting.move_slots
    patch.setattr(evicting, "move_slots", lambda tensors, pages, slots, size: own(tensors, pages, slots.flip(1), size))


def _every_layer_as_the_first(patch: pytest.MonkeyPatch) -> None:
    own = Evictor._padded
    patch.setattr(Evictor, "_padded", lambda self, *of: [own(self, *of)[0].clone() for _ in self.store.layers])


def _every_head_as_all_together(patch: pytest.MonkeyPatch) -> None:
    own = Evictor._padded
    patch.setattr(Evictor, "_padded", lambda self, *of: [m.sum(0).expand(len(m), -1).clone() for m in own(self, *of)])


@pytest.mark.parametrize(
    "plant",
    [
        _nothing_counted,
        _positions_as_slots,
        _moved_the_wrong_way_round,
        _every_layer_as_the_first,
        _every_head_as_all_together,
    ],  # fmt: skip
)
def test_an_engine_that_keeps_others_is_reported(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert breaks(ORACLE, HEAVY)


def test_an_engine_that_evicts_wherever_a_step_ends_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EvictionBudget, "tokens_until_eviction", lambda *_: None)
    assert breaks("chunked = whole", HEAVY) and breaks("batched = alone", HEAVY)


def test_pages_that_do_not_come_back_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    own = KVCacheManager.evict

    def evict(self: KVCacheManager, sequence) -> str:
        before = [list(pages) for pages in sequence.pages]
        said = own(self, sequence)
        for pool, pages, had in zip(self.pools, sequence.pages, before, strict=True):
            pool.allocate(len(had) - len(pages))
        return said

    monkeypatch.setattr(KVCacheManager, "evict", evict)
    assert breaks(KEPT, SNAP)


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(WorkbenchError, match="evict: Input tag 'h2o'"):
        check_evict({"kind": "h2o", "budget": 4})
