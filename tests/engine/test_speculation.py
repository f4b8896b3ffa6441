"""Speculation is invisible: the same tokens, the same rows, the same pages, whatever is proposed."""

from __future__ import annotations

import pytest
import torch

from compiled_kernels import Backend
from tests.engine.guesses import Guesses, drafts, needs_mlir, plain, run_checked, tokens
from tests.engine.tiny import Oracle, layer, model_of, request, runner_of, spec_of
from workbench.engine.runner import generate
from workbench.executors.select import Backends
from workbench.kv_cache.format import CacheFormat
from workbench.kv_cache.manager import KVCacheManager
from workbench.request import Sequence
from workbench.sampling import sampler as choose
from workbench.sampling.samplers import SampledToken
from workbench.scheduler.plan import Span
from workbench.trace.events import Decoded, Finished, Stepped, Verified

PACKED = CacheFormat(format="int8", quant_group=8, columns=8, residual_length=8)


def keeps_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "free_rejected_drafts", lambda self, sequence: None)


def takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every drafted token stands."""

    def greedy(draft, rows, largest, tokens):
        return [*map(SampledToken, draft.token_ids), SampledToken(tokens[rows[-1]])]

    monkeypatch.setattr(choose, "_greedy", greedy)


def one_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each drafted token is computed a place too early."""
    wrong = property(lambda s: [*s.sequence.token_ids[s.start : s.end - len(s.drafts)], *s.drafts[1:], *s.drafts[:1]])
    monkeypatch.setattr(Span, "token_ids", wrong)


@pytest.mark.parametrize("bug", [keeps_pages, takes_all, one_off])
def test_planted_bugs_are_seen(bug, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = model_of(spec_of()), [request("a", 5, 20), request("b", 9, 20)]
    wanted = plain(model, asked)

    def same() -> bool:
        proposer = Guesses({name: end.token_ids for name, end in wanted.items()})
        return tokens(run_checked(runner_of(model, speculator=drafts(proposer)), asked)) == tokens(wanted)

    assert same()
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        assert same()


@pytest.mark.parametrize("way", [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 9, "logprobs": 2}])
def test_events_are_those_of_a_run_without(way: dict) -> None:
    """Token for token and in order, where drafts stand by match; stop tokens, limits and samples among them."""
    model = model_of(spec_of(layer(), layer(sliding_window=9)))
    asked = [request(f"r{i}", 4 + i, 9 + i, seed=i, stop_token_ids=(i, 7), **way) for i in range(4)]
    asked.append(request("many", 6, 8, seed=9, n=3, **way))
    wanted = list(runner_of(model).stream(asked))
    answers = {
        f"{e.request_id}#{e.sample}" if e.sample else e.request_id: e.token_ids
        for e in wanted
        if isinstance(e, Finished)
    }
    found = list(runner_of(model, speculator=drafts(Guesses(answers), accept="match")).stream(asked))

    def emitted(events) -> dict:
        return {
            (name, sample): [
                (e.token_id, e.index, e.text, pytest.approx(e.logprob, abs=1e-4))
                for e in events
                if isinstance(e, Decoded) and (e.request_id, e.sample) == (name, sample)
            ]
            for name, sample in {(e.request_id, e.sample) for e in events if isinstance(e, Decoded)}
        }

    def ends(events) -> dict:
        found = (e for e in events if isinstance(e, Finished))
        return {(e.request_id, e.sample): (e.token_ids, e.reason) for e in found}

    assert emitted(found) == emitted(wanted) and ends(found) == ends(wanted)
    checks = [e for e in found if isinstance(e, Verified)]
    for check in checks:  # accepted tokens are emitted next, and after them another than the rejected one
        mine = [e for e in found if isinstance(e, Decoded) and (e.step, e.request_id) == (check.step, check.request_id)]
        ids = tuple(e.token_id for e in mine if e.sample == check.sample)
        assert (
            len(check.token_ids) == check.drafted
            and check.token_ids[: check.accepted][: len(ids)] == ids[: check.accepted]
        )
        if check.accepted < min(check.drafted, len(ids)):
            assert ids[check.accepted] != check.token_ids[check.accepted]
    steps = [e for e in found if isinstance(e, Stepped)]
    assert sum(e.accepted for e in checks) == sum(e.accepted_tokens for e in steps) > 0
    assert sum(e.drafted for e in checks) == sum(e.drafted_tokens for e in steps)
    assert all(0 <= e.accepted <= e.drafted <= 3 for e in checks)


def test_rows_of_one_sequence_are_the_span() -> None:
    runner = runner_of(model_of(spec_of(layer(), layer(sliding_window=5))))
    own = Sequence.from_request(request("a", 9, 5), 0)
    runner.scheduler.submit(own)
    plan = runner.scheduler.plan()
    assert plan is not None
    runner.executor.forward(plan)
    runner.scheduler.commit(plan, {"a": 3})
    check = runner.scheduler.plan({"a": (4, 5, 6)})
    assert check is not None and [(s.length, s.draft_token_ids) for s in check.spans] == [(4, (4, 5, 6))]
    whole = runner.executor.forward(check)
    rows = check.as_decode_rows()
    assert [(s.start, s.length, s.token_ids) for s in rows.spans] == [
        (9, 1, [3]),
        (10, 1, [4]),
        (11, 1, [5]),
        (12, 1, [6]),
    ]
    torch.testing.assert_close(runner.executor.forward(rows), whole)
    assert check.as_decode_rows(3) is check


@needs_mlir
def test_checks_in_the_compiled_step_are_the_oracles() -> None:
    """Rows of one sequence beside another's, over several kinds of layer."""
    windowed = layer(4, 2, sliding_window=5, num_sink_tokens=2, softcap=1.5)
    kinds = layer(4, 2, bias=True), windowed, layer(2, 1, dim=6, qk_norm=True)
    model = model_of(spec_of(*kinds))
    asked = [request(f"r{i}", 3 + 9 * i, 9 + i) for i in range(2)]
    wanted = plain(model, asked)
    proposer = Guesses({name: end.token_ids for name, end in wanted.items()})
    mixed = Backends(Backend.MLIR, Backend.EAGER, Backend.EAGER, "decode steps alone are compiled")
    runner = runner_of(model, backends=mixed, speculator=drafts(proposer, 2))
    Oracle(runner)
    assert tokens(generate(runner, asked)) == tokens(wanted)
    assert runner.executor.inner.verify_steps  # type: ignore[attr-defined]


@needs_mlir
@pytest.mark.parametrize("threads", [1, 2])
def test_packed_pages_and_shared_contexts_in_the_compiled_step(threads: int) -> None:
    model = model_of(spec_of(layer(4, 2, dim=8), layer(4, 2, dim=8, sliding_window=20)))
    asked = [request("r", 20, 12)]
    shared = {"cache": PACKED, "page_size": 8}
    wanted = plain(model, asked, **shared)
    proposer = Guesses({name: end.token_ids for name, end in wanted.items()})
    mixed = Backends(Backend.MLIR, Backend.EAGER, Backend.EAGER, "decode steps alone are compiled")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runner = runner_of(model, backends=mixed, speculator=drafts(proposer), **shared)
        assert tokens(generate(runner, asked)) == tokens(wanted)
        assert runner.executor.verify_steps  # type: ignore[attr-defined]
    finally:
        torch.set_num_threads(before)
