"""Speculation is invisible: the same tokens, the same rows, the same pages, whatever is proposed."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from compiled_kernels import Backend
from tests.engine.guesses import Guesses, drafts, needs_mlir, plain, tokens
from tests.engine.tiny import Oracle, layer, model_of, request, runner_of, spec_of
from tests.helpers.events import of
from workbench.engine.inputs import sample_id
from workbench.engine.runner import generate
from workbench.executors.select import Backends
from workbench.kv_cache.format import CacheFormat
from workbench.request import Sequence
from workbench.trace.events import Decoded, Finished, Stepped, Verified

PACKED = CacheFormat(format="int8", quant_group=8, columns=8, residual_length=8)


@pytest.mark.parametrize("way", [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 9, "logprobs": 2}])
def test_events_are_those_of_a_run_without(way: dict) -> None:
    """Token for token and in order, where drafts stand by match; stop tokens, limits and samples among them."""
    model = model_of(spec_of(layer(), layer(sliding_window=9)))
    asked = [request(f"r{i}", 4 + i, 9 + i, seed=i, stop_token_ids=(i, 7), **way) for i in range(4)]
    asked.append(request("many", 6, 8, seed=9, n=3, **way))
    wanted = list(runner_of(model).stream(asked))
    answers = {sample_id(e.request_id, e.sample): e.token_ids for e in of(Finished, wanted)}
    found = list(runner_of(model, speculator=drafts(Guesses(answers), accept="match")).stream(asked))

    def emitted(events) -> dict:
        streams = defaultdict(list)
        for e in of(Decoded, events):
            streams[e.request_id, e.sample].append((e.token_id, e.index, e.text, pytest.approx(e.logprob, abs=1e-4)))
        for e in of(Finished, events):
            streams[e.request_id, e.sample].append((e.token_ids, e.reason))
        return streams

    assert emitted(found) == emitted(wanted)
    checks = of(Verified, found)
    for check in checks:  # accepted tokens are emitted next, and after them another than the rejected one
        mine = [e for e in found if isinstance(e, Decoded) and (e.step, e.request_id) == (check.step, check.request_id)]
        ids = tuple(e.token_id for e in mine if e.sample == check.sample)
        assert (
            len(check.token_ids) == check.drafted
            and check.token_ids[: check.accepted][: len(ids)] == ids[: check.accepted]
        )
        if check.accepted < min(check.drafted, len(ids)):
            assert ids[check.accepted] != check.token_ids[check.accepted]
    steps = of(Stepped, found)
    assert sum(e.accepted for e in checks) == sum(e.accepted_tokens for e in steps) > 0
    assert sum(e.drafted for e in checks) == sum(e.drafted_tokens for e in steps)
    assert all(0 <= e.accepted <= e.drafted <= 3 for e in checks)


def test_rows_of_one_sequence_are_the_span() -> None:
    runner = runner_of(model_of(spec_of(layer(), layer(sliding_window=5))))
    own = Sequence.from_request(request("a", 9, 5), 0)
    runner.scheduler.submit(own)
    plan = runner.scheduler.plan()
    assert plan is not None
    runner.core.executor.forward(plan)
    runner.scheduler.commit(plan, {"a": 3})
    check = runner.scheduler.plan({"a": (4, 5, 6)})
    assert check is not None and [(s.length, s.draft_token_ids) for s in check.spans] == [(4, (4, 5, 6))]
    whole = runner.core.executor.forward(check)
    rows = check.as_decode_rows()
    assert [(s.start, s.length, s.token_ids) for s in rows.spans] == [
        (9, 1, [3]),
        (10, 1, [4]),
        (11, 1, [5]),
        (12, 1, [6]),
    ]
    torch.testing.assert_close(runner.core.executor.forward(rows), whole)
    assert check.as_decode_rows(3) is check


@needs_mlir
@pytest.mark.parametrize(("kinds", "prompts", "more", "threads"), [
    ((layer(4, 2, bias=True), layer(4, 2, sliding_window=5, num_sink_tokens=2, softcap=1.5),
      layer(2, 1, dim=6, qk_norm=True)), (3, 12), {}, 1),
    *(((layer(4, 2, dim=8), layer(4, 2, dim=8, sliding_window=20)), (20,), {"cache": PACKED, "page_size": 8}, threads)
      for threads in (1, 2)),
])  # fmt: skip
def test_checks_in_the_compiled_step(kinds: tuple, prompts: tuple, more: dict, threads: int, two_threads: None) -> None:
    """Rows of one sequence beside another's, over several kinds of layer, packed pages and shared contexts."""
    torch.set_num_threads(threads)
    model, asked = model_of(spec_of(*kinds)), [request(f"r{i}", length, 12 - i) for i, length in enumerate(prompts)]
    wanted = plain(model, asked, **more)
    proposer = Guesses({name: end.token_ids for name, end in wanted.items()})
    mixed = Backends(Backend.MLIR, Backend.EAGER, Backend.EAGER, "decode steps alone are compiled")
    runner = runner_of(model, backends=mixed, speculator=drafts(proposer, 3 if more else 2), **more)
    executor: Any = runner.core.executor
    if not more:  # packed pages have no oracle of rows
        Oracle(runner)
    assert tokens(generate(runner, asked)) == tokens(wanted)
    assert executor.programs["verify"].steps
