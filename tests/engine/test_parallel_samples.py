"""Samples of one request share the pages of its prompt, and are the requests of their seeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.poison import MODEL, poisoned
from tests.engine.tiny import finals, request, runner_of
from workbench.engine.runner import generate
from workbench.trace.events import Scheduled, Stepped
from workbench.trace.recorder import Recorder


@pytest.mark.parametrize(("prompt", "prefix"), [(1, "off"), (7, "radix"), (8, "off"), (8, "radix"), (9, "radix")])
def test_samples_are_the_requests_of_their_seeds(prompt: int, prefix: str) -> None:
    """A prompt of a page, of a token less and of one more."""
    runner = runner_of(MODEL, prefix=prefix, max_num_seqs=3)
    poisoned(runner)
    one = request("a", prompt, 9, temperature=0.9, seed=5, n=4)
    each = [replace(one, sampling=one.sampling.model_copy(update={"n": 1, "seed": 5 + k})) for k in range(4)]
    alone = {f"a#{k}" if k else "a": finals(runner_of(MODEL), [each[k]])["a"] for k in range(4)}
    done = generate(runner, [one])
    assert {name: event.token_ids for name, event in done.items()} == alone
    assert [event.sample for event in done.values()] == [int(name[2:] or 0) for name in done]
    assert len(set(alone.values())) > 1 and runner.scheduler.pages_in_use == 0


def test_samples_share_the_prompt_and_copy_its_last_page() -> None:
    runner = runner_of(MODEL, max_num_batched_tokens=64)
    steps, held = [], []
    for event in runner.stream([request("a", 10, 4, temperature=0.9, n=3), request("b", 3, 2)]):
        if isinstance(event, Stepped):
            steps.append(event)
            held.append(len({page for s in runner.scheduler.running for page in s.pages[0] if page}))
        if isinstance(event, Scheduled) and event.request_id == "a" and event.sample == 1:
            assert event.reason == "admitted: shares 5 pages with a"
    # Nine tokens of the prompt are computed once, the tenth by each sample.
    assert [step.prefill_tokens for step in steps][:2] == [9 + 3, 3]
    done = generate(runner, [request("a", 10, 4, temperature=0.9, n=3)])
    assert [event.computed_tokens for event in done.values()] == [13, 4, 4]
    assert [event.cached_tokens for event in done.values()] == [0, 9, 9]
    # In the table that reads everything, between steps: two pages of eight tokens together, and a third of each.
    assert max(held) == 2 + 3


def test_rows_of_samples() -> None:
    recorder = Recorder()
    runner = runner_of(MODEL, listener=recorder.record)
    generate(runner, [request("a", 6, 3, temperature=0.9, n=2), request("b", 6, 3)])
    names = ("request_id", "sample", "output_tokens", "cached_tokens")
    rows = [tuple(row[name] for name in names) for row in recorder.requests()]
    assert rows == [("a", 0, 3, 0), ("a", 1, 3, 5), ("b", 0, 3, 0)]
    assert {(row["request_id"], row["sample"]) for row in recorder.tokens()} == {("a", 0), ("a", 1), ("b", 0)}
