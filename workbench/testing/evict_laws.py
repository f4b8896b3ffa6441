"""Laws of eviction: the budget is kept, and a text loses the same tokens however it is chunked, batched and paged.

Models compute in float64, so that only a broken law makes a difference.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from workbench.cache.budget import Budget
from workbench.cache.evict import PREFIX, Evict
from workbench.cache.pages import pages_for
from workbench.engine.runner import Runner
from workbench.engine.scheduler import Limits
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters, Sequence
from workbench.testing.attention_scenes import CONTEXT, Rows, Scene, must_agree, rows_of
from workbench.testing.evict_oracle import evicted_rows
from workbench.testing.report import Broken

MOST = 14  # output tokens of each text
ROUNDING = 1e-9


@dataclass(frozen=True)
class Within:
    """A policy under another budget, small enough for small texts."""

    policy: Evict
    tokens: int

    @property
    def gives_up(self) -> frozenset[str]:
        return self.policy.gives_up

    @property
    def observes(self) -> int | None:
        return self.policy.observes

    def budget_for(self, page_size: int, page_bytes: int) -> Budget:
        # A budget in bytes is replaced here: a page takes one of one byte.
        return replace(self.policy.budget_for(1, 1), tokens=self.tokens, ratio=None)

    def keep(self, mass: Tensor, budget: int) -> Tensor:
        return self.policy.keep(mass, budget)


@dataclass(frozen=True)
class EvictScene:
    """A model, texts, and the token budget of each text."""

    scene: Scene
    tokens: int

    def __repr__(self) -> str:
        return f"a budget of {self.tokens} tokens and {self.scene}"

    def texts(self) -> dict[str, tuple[int, ...]]:
        return {f"{i}": text for i, text in enumerate(self.scene.texts())}

    def rows(self, policy: Evict | None, texts: dict[str, tuple[int, ...]] | None = None, **settings) -> Rows:
        given = self.texts() if texts is None else texts
        policy = None if policy is None else Within(policy, settings.pop("tokens", self.tokens))
        return rows_of(self.scene.model({}), given, MOST, evict=policy, **settings)

    def budget(self, policy: Evict) -> Budget:
        return Within(policy, self.tokens).budget_for(1, 1)


def evict_scenes() -> st.SearchStrategy[EvictScene]:
    """Draw scenarios.

    The simplest, tried first, has texts three times as long as the budget, and two key/value heads.
    """
    lengths = st.lists(st.sampled_from([24, 40, 9, 31, 2, 17, 13, 36]), min_size=2, max_size=3).map(tuple)
    sizes = st.sampled_from([2, 1]), st.integers(1, 3), st.sampled_from([4, 8])
    scenes = st.builds(Scene, st.integers(0, 10_000), *sizes, lengths, st.sampled_from([7, 1, 3, 12]),
                       st.sampled_from([4, 1, 9, 3]))  # fmt: skip
    return st.builds(EvictScene, scenes, st.sampled_from([8, 2, 3, 5, 12, 20, 30]))


def choosing() -> st.SearchStrategy[tuple[Tensor, int]]:
    """Draw attention masses and budgets, mostly budgets below the number of tokens; the simplest are of these."""
    masses = st.lists(st.floats(0, 100, width=32), min_size=2, max_size=60)
    short = st.tuples(masses, st.integers(1, 40)).map(lambda drawn: (drawn[0], min(drawn[1], len(drawn[0]) - 1)))
    wide = st.tuples(masses.map(lambda mass: mass[1:]), st.integers(1, 40))
    return st.one_of(short, wide).map(lambda drawn: (torch.tensor(drawn[0], dtype=torch.float64), drawn[1]))


def chooses(policy: Evict, asked: tuple[Tensor, int]) -> None:
    mass, budget = asked
    kept = policy.keep(mass.clone(), budget).tolist()
    where = f"of {len(mass)} tokens with a budget of {budget}"
    if len(kept) != min(budget, len(mass)):
        raise Broken(f"keeps {len(kept)} {where}")
    if kept != sorted(set(kept)) or kept[0] < 0:
        raise Broken(f"keeps {kept} {where}: not ascending places, each once")
    if kept[-1] != len(mass) - 1:
        raise Broken(f"keeps {kept} {where}: the newest is not among them")
    if policy.keep(mass.clone(), budget).tolist() != kept:
        raise Broken(f"keeps others when asked again, {where}")


def _within_budget(policy: Evict, scene: EvictScene) -> None:
    """Check every sequence after every step; bytes are counted from the pages in use."""
    budget, size = scene.budget(policy), scene.scene.page_size
    limits = Limits(4, max(2, scene.scene.budget))
    runner = Runner(scene.scene.model({}), limits=limits, page_size=size, pages=4 * CONTEXT,
                    evict=Within(policy, scene.tokens))  # fmt: skip
    greedy = SamplingParameters(temperature=0, max_tokens=MOST, ignore_eos=True)
    for name, ids in scene.texts().items():
        runner.submit(Request(name, ids, greedy))
    pool, page = runner.scheduler.pools[0], runner.store.page_bytes(0)
    while runner.busy:
        runner.step()
        allowed = 0
        for sequence in runner.scheduler.running:
            prompt, most = sequence.prompt_length, _allowed(budget, sequence)
            where = f"after {sequence.computed} tokens of a prompt of {prompt}, on {scene}"
            if sequence.held > most:
                raise Broken(f"{sequence.held} tokens are held where {most} may be, {where}")
            if len(sequence.pages[0]) > pages_for(most, size):
                raise Broken(f"{len(sequence.pages[0])} pages of {size} tokens are held for {most} tokens, {where}")
            allowed += pages_for(most, size) * page
        if pool.used * page > allowed or pool.used + pool.free != pool.pages:
            raise Broken(f"{pool.used * page} bytes are held where {allowed} may be, on {scene}")
    if pool.free != pool.pages:
        raise Broken(f"{pool.pages - pool.free} pages did not come back, on {scene}")


def _allowed(budget: Budget, sequence: Sequence) -> int:
    """Return the most tokens that `sequence` may hold after a step."""
    prompt, most = sequence.prompt_length, budget.most(sequence.prompt_length)
    if budget.in_decode:
        return most
    return prompt if sequence.computed <= prompt else min(prompt, most) + sequence.computed - prompt


def _oracle(policy: Evict, scene: EvictScene) -> None:
    model, texts = scene.scene.model({}), scene.texts()
    found = scene.rows(policy, page_size=scene.scene.page_size, max_num_batched_tokens=max(2, scene.scene.budget))
    for name, text in texts.items():
        mine = {place: row for (text_name, place), row in found.items() if text_name == name}
        longest = max(mine)
        right = evicted_rows(model, policy, scene.budget(policy), mine[longest][0], len(text))
        for place, (_, row) in mine.items():
            away = float((row - right[place - 1]).abs().max())
            if not away <= ROUNDING * (1 + float(right.abs().max())):
                raise Broken(f"is {away:.2g} away from the oracle after {place} tokens of text {name}, on {scene}")


def _batched(policy: Evict, scene: EvictScene) -> None:
    """Batch with so small a token budget that other requests change the chunks of a text."""
    few = max(2, scene.scene.budget)
    together = scene.rows(policy, max_num_batched_tokens=few)
    for name, text in scene.texts().items():
        alone = scene.rows(policy, {name: text}, max_num_batched_tokens=few)
        must_agree(alone, together, "beside other texts it gives other rows than alone", scene.scene)


def _chunked(policy: Evict, scene: EvictScene) -> None:
    chunked = scene.rows(policy, max_num_batched_tokens=scene.scene.budget)
    told = f"in steps of {scene.scene.budget} tokens it gives other rows than at once"
    must_agree(chunked, scene.rows(policy), told, scene.scene)


def _paged(policy: Evict, scene: EvictScene) -> None:
    size, pages = scene.scene.page_size, 4 * CONTEXT
    order = random.Random(scene.scene.seed).sample(range(1, pages + 1), pages)
    scattered = scene.rows(policy, page_size=size, pages=pages, page_orders=(order,))
    told = f"in pages of {size} tokens in random order it gives other rows than in one page"
    must_agree(scattered, scene.rows(policy), told, scene.scene)


def _set_back(policy: Evict, scene: EvictScene) -> None:
    """Leave pages for little more than one text: others are preempted, then recomputed or swapped in."""
    size, budget = scene.scene.page_size, scene.budget(policy)
    needs = [pages_for(budget.at_once(len(ids), len(ids) + MOST - 1), size) for ids in scene.texts().values()]
    for offload in ("none", "memory"):
        cramped = scene.rows(policy, page_size=size, pages=max(needs) + 1, offload=offload)
        told = f"set back (offload {offload}) it gives other rows than undisturbed"
        must_agree(cramped, scene.rows(policy), told, scene.scene)


def _roomy(policy: Evict, scene: EvictScene) -> None:
    """Check bit for bit that counting attention changes nothing."""
    plain = scene.rows(None)
    for place, (tokens, row) in scene.rows(policy, tokens=CONTEXT).items():
        before, right = plain.get(place, (None, row))
        if before != tokens or not torch.equal(row, right):
            raise Broken(f"with a budget of {CONTEXT} tokens, rows after {place[1]} tokens differ from those without")


def _no_prefix(policy: Evict, scene: EvictScene) -> None:
    try:
        scene.rows(policy, prefix="radix")
    except WorkbenchError:
        return
    raise Broken("a runner takes it together with prefix reuse, which it gives up")


LAWS: dict[str, Callable[[Evict, EvictScene], None]] = {
    "the budget is kept at every step, in tokens, pages and bytes; all pages come back": _within_budget,
    "what stays is what a model without pages, batches and chunks keeps, head by head": _oracle,
    "batched = alone": _batched,
    "chunked = whole": _chunked,
    "pages of any size in any order = one page": _paged,
    "set back = undisturbed": _set_back,
    "with room for every token nothing changes, bit for bit": _roomy,
}
INSTEAD: dict[str, Callable[[Evict, EvictScene], None]] = {PREFIX: _no_prefix}
