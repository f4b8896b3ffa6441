"""Check an eviction policy against its laws: sequences stay within the budget, and chunking, batching and paging do not
change the evicted tokens.

Models compute in float64, so that only a broken law makes a difference.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.kv_cache.budget import EvictionBudget
from workbench.kv_cache.eviction import (
    PREFIX_LAW,
    AnyPolicy,
    LayerEvictionPolicy,
    LayerTokens,
    parse_eviction,
    policy_spread,
    select_slots,
)
from workbench.kv_cache.pages import pages_for
from workbench.request import Request, SamplingParameters, Sequence
from workbench.settings import Settings
from workbench.testing.attention_scenarios import (
    CONTEXT,
    AttentionScenario,
    SampledLogits,
    require_equal_logits,
    sampled_logits,
)
from workbench.testing.eviction_oracle import evicted_logits
from workbench.testing.law import ConformityReport, Law, LawBroken, check_law

OUTPUT_TOKENS = 14  # output tokens of each text
ROUNDING = 1e-9


@dataclass(frozen=True)
class WithTokenBudget:
    """The same eviction policy with another token budget, small enough for small texts."""

    policy: AnyPolicy
    tokens: int

    @property
    def gives_up(self) -> frozenset[str]:
        return self.policy.gives_up

    @property
    def observes(self) -> int | None:
        return self.policy.observes

    @property
    def decay(self) -> float:
        return getattr(self.policy, "decay", 1.0)

    @property
    def spread(self) -> float:
        return policy_spread(self.policy)

    def budget_for(self, page_size: int, page_bytes: int) -> EvictionBudget:
        # Any budget in bytes is accepted, then replaced by `tokens`: page size and page bytes are 1.
        return replace(self.policy.budget_for(1, 1), tokens=self.tokens, ratio=None)

    def select_layer(self, layer: LayerTokens, budget: int) -> Tensor:
        return select_slots(self.policy, layer, budget)


class MergingWithTokenBudget(WithTokenBudget):
    """The same merging policy with another token budget."""

    def merge(self, layer: LayerTokens, keep: Tensor) -> tuple[Tensor, Tensor]:
        policy: Any = self.policy
        return policy.merge(layer, keep)


def with_token_budget(policy: AnyPolicy, tokens: int) -> WithTokenBudget:
    return (MergingWithTokenBudget if hasattr(policy, "merge") else WithTokenBudget)(policy, tokens)


@dataclass(frozen=True)
class EvictionScenario:
    """A scenario for eviction: a model and texts, and the token budget of each text."""

    scenario: AttentionScenario
    budget_tokens: int

    def __repr__(self) -> str:
        return f"a budget of {self.budget_tokens} tokens and {self.scenario}"

    def texts(self) -> dict[str, tuple[int, ...]]:
        return {f"{i}": text for i, text in enumerate(self.scenario.texts())}

    def rows(
        self, policy: AnyPolicy | None, texts: dict[str, tuple[int, ...]] | None = None, **settings
    ) -> SampledLogits:
        given = self.texts() if texts is None else texts
        limited = None if policy is None else with_token_budget(policy, settings.pop("tokens", self.budget_tokens))
        return sampled_logits(self.scenario.model({}), given, OUTPUT_TOKENS, evict=limited, **settings)

    def budget(self, policy: AnyPolicy) -> EvictionBudget:
        return with_token_budget(policy, self.budget_tokens).budget_for(1, 1)


def eviction_scenarios() -> st.SearchStrategy[EvictionScenario]:
    """Return a hypothesis strategy for eviction scenarios.

    The simplest scenario, tried first, has texts three times as long as the budget, and two key/value heads.
    """
    lengths = st.lists(st.sampled_from([24, 40, 9, 31, 2, 17, 13, 36]), min_size=2, max_size=3).map(tuple)
    sizes = st.sampled_from([2, 1]), st.integers(1, 3), st.sampled_from([4, 8])
    scenarios = st.builds(AttentionScenario, st.integers(0, 10_000), *sizes, lengths, st.sampled_from([7, 1, 3, 12]),
                       st.sampled_from([4, 1, 9, 3]))  # fmt: skip
    return st.builds(EvictionScenario, scenarios, st.sampled_from([8, 2, 3, 5, 12, 20, 30]))


def mass_and_budget() -> st.SearchStrategy[tuple[Tensor, int]]:
    """Return a hypothesis strategy for attention masses with a token budget. The budget is below the number of tokens
    in the simplest examples and in most others.
    """
    masses = st.lists(st.floats(0, 100, width=32), min_size=2, max_size=60)
    short = st.tuples(masses, st.integers(1, 40)).map(lambda drawn: (drawn[0], min(drawn[1], len(drawn[0]) - 1)))
    wide = st.tuples(masses.map(lambda mass: mass[1:]), st.integers(1, 40))
    return st.one_of(short, wide).map(lambda drawn: (torch.tensor(drawn[0], dtype=torch.float64), drawn[1]))


def check_choice(policy: Any, drawn: tuple[Tensor, int]) -> None:
    mass, budget = drawn
    kept = policy.select(mass.clone(), budget).tolist()
    where = f"of {len(mass)} tokens with a budget of {budget}"
    if len(kept) != min(budget, len(mass)):
        raise LawBroken(f"keeps {len(kept)} {where}")
    if kept != sorted(set(kept)) or kept[0] < 0:
        raise LawBroken(f"keeps {kept} {where}: not ascending places, each once")
    if kept[-1] != len(mass) - 1:
        raise LawBroken(f"keeps {kept} {where}: the newest is not among them")
    if policy.select(mass.clone(), budget).tolist() != kept:
        raise LawBroken(f"keeps other tokens in a second call, {where}")


def layers_and_budget() -> st.SearchStrategy[tuple[tuple[LayerTokens, ...], int]]:
    """Return a hypothesis strategy for the tokens of a text in three layers, with a budget below the number
    of tokens.
    """

    def build(seed: int, heads: int, slots: int, budget: int) -> tuple[tuple[LayerTokens, ...], int]:
        generator, budget = torch.Generator().manual_seed(seed), max(1, min(budget, slots - 1))
        drawn = torch.rand(3, heads, slots, generator=generator, dtype=torch.float64) ** 4
        rows = torch.randn(3, 2, heads, slots, 4, generator=generator, dtype=torch.float64)
        layers = (
            LayerTokens(layer, 3, drawn[layer], budget, functools.partial(tuple, rows[layer])) for layer in range(3)
        )
        return tuple(layers), budget

    sizes = st.sampled_from([2, 1, 3]), st.integers(2, 60), st.integers(2, 40)
    return st.builds(build, st.integers(0, 10_000), *sizes)


def check_layer_choice(policy: LayerEvictionPolicy, drawn: tuple[tuple[LayerTokens, ...], int]) -> None:
    layers, budget = drawn
    spread, held = policy_spread(policy), layers[0].mass.shape[1]
    most = max(budget, min(math.ceil(spread * budget), held - 1))
    where, counts = f"of {held} tokens with a budget of {budget}", []
    for layer in layers:
        read = functools.partial(lambda drawn: (drawn.keys, drawn.values), layer)
        tokens = LayerTokens(layer.layer, layer.num_layers, layer.mass, most, read)
        before = [each.clone() for each in (tokens.mass, tokens.keys, tokens.values)]
        try:
            keep = select_slots(policy, tokens, budget)
        except WorkbenchError as error:
            raise LawBroken(f"{error}, {where}") from None
        counts += keep.sum(1).tolist()
        merge: Any = getattr(policy, "merge", None)
        if merge is not None:
            merge(tokens, keep)
        if not all(map(torch.equal, before, (tokens.mass, tokens.keys, tokens.values))):
            raise LawBroken(f"changes its input, {where}")
        if not torch.equal(policy.select_layer(tokens, budget), keep):
            raise LawBroken(f"keeps other tokens in a second call, {where}")
    if sum(counts) > budget * len(counts):
        raise LawBroken(f"keeps {sum(counts) / len(counts):.1f} on average {where}")


def _within_budget(policy: AnyPolicy, scenario: EvictionScenario) -> None:
    """Check tokens, pages and bytes of every sequence after every step; bytes are computed from the pages in use."""
    budget, size = scenario.budget(policy), scenario.scenario.page_size
    tokens = max(2, scenario.scenario.max_num_batched_tokens)
    limited = with_token_budget(policy, scenario.budget_tokens)
    config = EngineConfig.build(
        max_num_seqs=4, max_num_batched_tokens=tokens, page_size=size, pages=4 * CONTEXT, evict=limited
    )
    runner = Runner(config, LoadedModel(scenario.scenario.model({})))
    greedy = SamplingParameters(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for name, ids in scenario.texts().items():
        runner.submit(Request(name, ids, greedy))
    pool, page = runner.scheduler.pools[0], runner.store.page_bytes(0)
    while runner.has_unfinished_requests:
        runner.step()
        allowed = 0
        for sequence in runner.scheduler.running:
            prompt, most = sequence.prompt_length, _allowed(budget, sequence)
            where = f"after {sequence.num_computed_tokens} tokens of a prompt of {prompt}, on {scenario}"
            if sequence.num_stored_tokens > most:
                raise LawBroken(f"{sequence.num_stored_tokens} tokens are held where {most} may be, {where}")
            if len(sequence.pages[0]) > pages_for(most, size):
                raise LawBroken(f"{len(sequence.pages[0])} pages of {size} tokens are held for {most} tokens, {where}")
            allowed += pages_for(most, size) * page
        if pool.num_used * page > allowed or pool.num_used + pool.num_free != pool.num_pages:
            raise LawBroken(f"{pool.num_used * page} bytes are held where {allowed} may be, on {scenario}")
    if pool.num_free != pool.num_pages:
        raise LawBroken(f"{pool.num_pages - pool.num_free} pages were not freed, on {scenario}")


def _allowed(budget: EvictionBudget, sequence: Sequence) -> int:
    """Return the maximum number of tokens that `sequence` may store after a step."""
    prompt, most = sequence.prompt_length, budget.max_tokens(sequence.prompt_length)
    if budget.in_decode:
        return most
    if sequence.num_computed_tokens <= prompt:
        return prompt
    if prompt <= most:
        return sequence.num_computed_tokens
    return budget.slots_after_eviction(prompt) + sequence.num_computed_tokens - prompt


def _oracle(policy: AnyPolicy, scenario: EvictionScenario) -> None:
    model, texts = scenario.scenario.model({}), scenario.texts()
    found = scenario.rows(
        policy,
        page_size=scenario.scenario.page_size,
        max_num_batched_tokens=max(2, scenario.scenario.max_num_batched_tokens),
    )
    for name, text in texts.items():
        mine = {place: row for (text_name, place), row in found.items() if text_name == name}
        longest = max(mine)
        right = evicted_logits(model, policy, scenario.budget(policy), mine[longest][0], len(text))
        for place, (_, row) in mine.items():
            away = float((row - right[place - 1]).abs().max())
            if not away <= ROUNDING * (1 + float(right.abs().max())):
                raise LawBroken(
                    f"is {away:.2g} away from the oracle after {place} tokens of text {name}, on {scenario}"
                )


def _batched(policy: AnyPolicy, scenario: EvictionScenario) -> None:
    """Batch texts with a small step budget, so that other requests change the chunks of a text."""
    few = max(2, scenario.scenario.max_num_batched_tokens)
    together = scenario.rows(policy, max_num_batched_tokens=few)
    for name, text in scenario.texts().items():
        alone = scenario.rows(policy, {name: text}, max_num_batched_tokens=few)
        require_equal_logits(alone, together, "in a batch it gives other rows than alone", scenario.scenario)


def _chunked(policy: AnyPolicy, scenario: EvictionScenario) -> None:
    chunked = scenario.rows(policy, max_num_batched_tokens=scenario.scenario.max_num_batched_tokens)
    message = f"in steps of {scenario.scenario.max_num_batched_tokens} tokens it gives other rows than at once"
    require_equal_logits(chunked, scenario.rows(policy), message, scenario.scenario)


def _paged(policy: AnyPolicy, scenario: EvictionScenario) -> None:
    size, pages = scenario.scenario.page_size, 4 * CONTEXT
    order = random.Random(scenario.scenario.seed).sample(range(1, pages + 1), pages)
    scattered = scenario.rows(policy, page_size=size, pages=pages, page_orders=(order,))
    message = f"in pages of {size} tokens in random order it gives other rows than in one page"
    require_equal_logits(scattered, scenario.rows(policy), message, scenario.scenario)


def _preempted(policy: AnyPolicy, scenario: EvictionScenario) -> None:
    """Run with pages for little more than one text: others are preempted, then recomputed or swapped in."""
    size, budget = scenario.scenario.page_size, scenario.budget(policy)
    needs = [
        pages_for(budget.peak_tokens(len(ids), len(ids) + OUTPUT_TOKENS - 1), size) for ids in scenario.texts().values()
    ]
    for offload in ("none", "memory"):
        cramped = scenario.rows(policy, page_size=size, pages=max(needs) + 1, offload=offload)
        message = f"preempted (offload {offload}) it gives other logits than uninterrupted"
        require_equal_logits(cramped, scenario.rows(policy), message, scenario.scenario)


def _unlimited(policy: AnyPolicy, scenario: EvictionScenario) -> None:
    """Check that accumulating attention changes no bit of the logits."""
    plain = scenario.rows(None)
    for place, (tokens, row) in scenario.rows(policy, tokens=CONTEXT).items():
        before, right = plain.get(place, (None, row))
        if before != tokens or not torch.equal(row, right):
            raise LawBroken(
                f"with a budget of {CONTEXT} tokens, rows after {place[1]} tokens differ from those without"
            )


def _no_prefix(policy: AnyPolicy, scenario: EvictionScenario) -> None:
    try:
        scenario.rows(policy, prefix="radix")
    except WorkbenchError:
        return
    raise LawBroken("a runner takes it together with prefix reuse, which it gives up")


EVICTION_LAWS: dict[str, Callable[[AnyPolicy, EvictionScenario], None]] = {
    "no step exceeds the budget, in tokens, pages and bytes; all pages are freed": _within_budget,
    "each head keeps the same tokens as in a model without pages, batches and chunks": _oracle,
    "batched = alone": _batched,
    "chunked = whole": _chunked,
    "pages of any size in any order = one page": _paged,
    "preempted = uninterrupted": _preempted,
    "with room for every token nothing changes, bit for bit": _unlimited,
}
REFUSALS: dict[str, Callable[[AnyPolicy, EvictionScenario], None]] = {PREFIX_LAW: _no_prefix}


def check_evict(policy: str | Mapping[str, Any] | AnyPolicy | Settings, examples: int = 6) -> ConformityReport:
    """Try `policy` in small models, and report for each law whether it holds.

    Args:
        policy: as for `load(evict=...)`: settings (`{"kind": "heavy_hitters", "budget": 256}`), the path of a
            user-defined policy (`{"path": "mine.py:Mine", "arguments": {"budget": 256}}`), or a policy object (see
            `workbench.parts.EvictionPolicy`). It is tried with small budgets of many sizes.
        examples: number of sets of texts tried for each law, the same in every call.

    Returns:
        A report; laws in the policy's `gives_up` are marked.

    Raises:
        WorkbenchError: if `policy` is not an eviction policy.
    """
    given = parse_eviction(policy)
    if given is None:
        raise WorkbenchError("check_evict: None evicts nothing; give settings or a policy")
    law = "keeps as many tokens as the budget, in order, with the newest; a second call keeps the same"
    if isinstance(given, LayerEvictionPolicy):
        laws = [check_law(law, functools.partial(check_layer_choice, given), 20 * examples, layers_and_budget())]
    else:
        laws = [check_law(law, functools.partial(check_choice, given), 20 * examples, mass_and_budget())]
    drawn = eviction_scenarios()
    for law, check in EVICTION_LAWS.items() if laws[0].ok else ():
        if law in given.gives_up:
            laws.append(Law(law, True, "given up", tried=False))
        else:
            laws.append(check_law(law, functools.partial(check, given), examples, drawn))
    for law in sorted(given.gives_up - EVICTION_LAWS.keys()):
        refused = REFUSALS.get(law)
        if refused is None:
            laws.append(Law(law, True, "given up", tried=False))
        else:
            laws.append(check_law(f"{law}: given up, and refused", functools.partial(refused, given), 1, drawn))
    return ConformityReport(f"eviction {given!r}", tuple(laws))
