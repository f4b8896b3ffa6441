"""A draft model's own cache follows what the target accepts."""

from __future__ import annotations

import pytest

from compiled_kernels import Lane
from tests.engine.guesses import drafts, needs_mlir, plain, tokens
from tests.engine.tiny import layer, model_of, request, runner_of, spec_of
from workbench.engine.draft_model import ModelDrafts, _Followed
from workbench.engine.lanes import Lanes
from workbench.engine.mlir_drafts import GreedySteps
from workbench.engine.runner import Runner, generate
from workbench.sampling.verify import NO_DRAFT, Draft
from workbench.trace.events import Finished, Verified


def model_drafts(runner: Runner, several: bool = False, **more) -> ModelDrafts:
    call = GreedySteps(runner.model, runner.store, 5) if several else None
    return ModelDrafts(
        runner.model.spec, runner.executor, runner.cache.holdings, runner.scheduler.limits.max_num_batched_tokens,
        several=call, **more,
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_target_always_stands(temperature: float) -> None:
    model = model_of(spec_of(layer(), layer(window=9)))
    asked = [request(f"r{i}", 4 + 13 * i, 9 + 3 * i, temperature=temperature, top_k=20, seed=i) for i in range(3)]
    runner = runner_of(model, drafts=drafts(model_drafts(runner_of(model))))
    checks = [e for e in runner.stream(asked) if isinstance(e, Verified)]
    assert checks and all(check.accepted == check.drafted for check in checks)


class Follows:
    """A proposer whose drafts are held against what its model says to the whole text, computed anew."""

    def __init__(self, inner: ModelDrafts, model, every: int = 1):
        self.inner, self.model, self.every = inner, model, every
        self.drafted = self.calls = 0

    def propose(self, sequences, counts) -> list[Draft]:
        self.calls += 1
        if self.calls % self.every:
            return [NO_DRAFT for _ in sequences]
        found = self.inner.propose(sequences, counts)
        for sequence, count, draft in zip(sequences, counts, found, strict=True):
            assert len(draft) == count
            for place, token in enumerate(draft.token_ids):
                logits = self.model.logits([*sequence.token_ids, *draft.token_ids[:place]])[-1]
                assert float(logits.max() - logits[token]) < 1e-4
                self.drafted += 1
        return found

    def forget(self, request_id: str) -> None:
        self.inner.forget(request_id)


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=needs_mlir)])
@pytest.mark.parametrize(("windowed", "every"), [(False, 1), (True, 1), (True, 3)])
def test_the_drafts_cache_follows_what_the_target_accepts(several: bool, windowed: bool, every: int) -> None:
    target, small = model_of(spec_of(), 1), model_of(spec_of(layer(), layer(window=9 if windowed else None)), 2)
    lanes = Lanes(Lane.MLIR, Lane.EAGER, Lane.EAGER, "") if several else None
    own = runner_of(small, lanes=lanes)
    proposer = Follows(model_drafts(own, several), small, every)
    asked = [request(f"r{i}", 2 + 17 * i, 20) for i in range(3)]
    runner = runner_of(target, drafts=drafts(proposer, 4), max_num_seqs=2)
    assert tokens(generate(runner, asked)) == tokens(plain(target, asked))
    assert proposer.drafted > 20 // every
    for each in asked:
        proposer.forget(each.request_id)
    assert all(pool.used == 0 for pool in own.scheduler.pools)


def test_a_draft_that_keeps_what_fell_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: its cache is never taken back."""

    def keep_to(self, token_ids):
        computed = self.own.computed
        right(self, token_ids)
        self.own.computed = min(computed, len(token_ids) - 1)

    right = _Followed.keep_to
    monkeypatch.setattr(_Followed, "keep_to", keep_to)
    small = model_of(spec_of(layer(), layer()), 2)
    runner = runner_of(model_of(spec_of(), 1), drafts=drafts(Follows(model_drafts(runner_of(small)), small, 3), 4))
    assert any("AssertionError" in end.error for end in generate(runner, [request("r", 19, 20)]).values())


def test_a_draft_without_pages_proposes_nothing() -> None:
    target = model_of(spec_of(), 1)
    own = runner_of(model_of(spec_of(), 2), pages=6)
    runner = runner_of(target, drafts=drafts(model_drafts(own)))
    asked = [request(f"r{i}", 12, 9) for i in range(3)]
    events = list(runner.stream(asked))
    assert {e.reason for e in events if isinstance(e, Finished)} == {"length"}
    assert any(isinstance(e, Verified) for e in events)
