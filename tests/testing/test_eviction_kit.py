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
from workbench.kv_cache import evicted_slots
from workbench.kv_cache.budget import EvictionBudget
from workbench.kv_cache.eviction import (
    FULL_ATTENTION_LAW,
    PREFIX_LAW,
    EvictionSettings,
    LayerTokens,
    parse_eviction,
    select_recent_and_heaviest,
)
from workbench.kv_cache.manager import KVCacheManager
from workbench.testing import check_evict, eviction
from workbench.testing.law import check_law

HEAVY = {"kind": "heavy_hitters", "budget": 64}
evicted_slots_apply = evicted_slots.SlotChange.apply
SNAP = {"kind": "snapkv", "budget": 64, "observe": 3, "pool": 3}
ORACLE = "each head keeps the same tokens as in a model without pages, batches and chunks"
KEPT = "no step exceeds the budget, in tokens, pages and bytes; all pages are freed"


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


def test_a_law_that_is_given_up_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for law in [each for each in eviction.EVICTION_LAWS if each != "chunked = whole"]:
        monkeypatch.delitem(eviction.EVICTION_LAWS, law)
    report = check_evict(replace(Own(), gives_up=frozenset({PREFIX_LAW, "chunked = whole"})), examples=1)
    assert ("chunked = whole", True, "given up", False) in report.laws


class OwnLayers(EvictionSettings):
    """A policy of layers: the first head keeps one token more than the budget, the last as many fewer; the newest token
    takes over the values that go. `wrong` says what is the matter with it."""

    wrong: str = ""

    @property
    def observes(self) -> int | None:
        return None

    @property
    def decay(self) -> float:
        return 0.5

    @property
    def spread(self) -> float:
        return 1.5

    def select_layer(self, layer: LayerTokens, budget: int) -> Tensor:
        heads, slots = layer.mass.shape
        keep = torch.zeros_like(layer.mass, dtype=torch.bool)
        more = min(1, budget - 1, layer.slots - budget) if heads > 1 else 0
        for head, mass in enumerate(layer.mass):
            count = budget + more * ((head == 0) - (head == heads - 1))
            keep[head, select_recent_and_heaviest(mass, count, 1)] = True
        if self.wrong == "newest":
            return keep.roll(-1, 1) if not keep[:, 0].all() else keep.flip(1)
        if self.wrong == "beyond":
            return torch.ones_like(keep)
        if self.wrong == "more" and layer.slots > budget:
            keep[:, -layer.slots :] = True
            keep[keep.sum(1) > layer.slots] = torch.arange(slots) >= slots - layer.slots
        if self.wrong == "changes":
            layer.mass.zero_()
        return keep.long() if self.wrong == "type" else keep

    def merge(self, layer: LayerTokens, keep: Tensor) -> tuple[Tensor, Tensor]:
        values = layer.values.clone()
        values[:, -1] += torch.where(keep[..., None], 0.0, values).sum(1)
        return layer.keys, values


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("newest", "evicted the newest token, which must stay"),
        ("beyond", "where a head may keep 1 to"),
        ("more", "on average of"),
        ("changes", "changes its input"),
        ("type", "not (2, "),
    ],
)
def test_the_fault_of_a_policy_of_layers_is_named(wrong: str, message: str) -> None:
    assert message in str(check_evict(OwnLayers(budget=9, wrong=wrong), examples=1))


def test_a_policy_of_layers_may_do_all_of_it() -> None:
    report = check_evict(OwnLayers(budget=9), examples=1)
    assert report.passed, str(report)


def _all_slots_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Evictor, "visible_slots", lambda *_: None)


def _one_head_s_slots_for_all(patch: pytest.MonkeyPatch) -> None:
    own = Evictor.visible_slots

    def visible(self: Evictor, plan) -> list[list[Tensor | None]] | None:
        found = own(self, plan)
        return found and [[each if each is None else each[:1].expand_as(each) for each in layer] for layer in found]

    patch.setattr(Evictor, "visible_slots", visible)


def _nothing_merged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evicted_slots.SlotChange, "apply", lambda *_: None)


def _merged_after_the_move(patch: pytest.MonkeyPatch) -> None:
    own = evicting.move_slots
    changes: list = []
    patch.setattr(evicting.SlotChange, "apply", lambda self, *where: changes.append((evicted_slots_apply, self, where)))

    def move(*of) -> None:
        own(*of)
        for apply, change, where in changes:
            apply(change, *where)
        changes.clear()

    patch.setattr(evicting, "move_slots", move)


def _nothing_fades(patch: pytest.MonkeyPatch) -> None:
    own = Evictor.__init__

    def init(self: Evictor, *of) -> None:
        own(self, *of)
        self._decay = 1.0

    patch.setattr(Evictor, "__init__", init)


@pytest.mark.parametrize(
    "plant", [_all_slots_seen, _one_head_s_slots_for_all, _nothing_merged, _merged_after_the_move, _nothing_fades]
)
def test_an_engine_that_shows_or_merges_others_is_reported(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    check = functools.partial(eviction.EVICTION_LAWS[ORACLE], OwnLayers(budget=9))
    assert not check_law(ORACLE, check, 4, eviction.eviction_scenarios()).ok


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

    patch.setattr("workbench.executors.programs.program.pack_batch", pack)


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
