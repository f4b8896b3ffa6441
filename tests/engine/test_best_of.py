"""Best of n: what `n` samples would be, ranked; silence until the last has ended; and samples beyond the places."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.poison import MODEL, Poison
from tests.engine.tiny import request, runner_of
from tests.helpers.events import of
from tests.thorough import tries
from workbench.custom import temporarily_registered
from workbench.engine.inputs import sample_id
from workbench.engine.runner import generate
from workbench.trace.events import Decoded, Finished, Preempted, Scheduled, Stepped, Submitted
from workbench.trace.recorder import Recorder

DRAWN = {"temperature": 0.9, "seed": 5}


def by_sum(samples: Sequence[Finished]) -> list[float]:
    return [float(sum(sample.token_ids) % 7) for sample in samples]


@settings(max_examples=tries(12))
@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_the_best_are_the_best_of_all(n: int, more: int, prompt: int, seqs: int, ranked_by_user: bool) -> None:
    """By log-probability, or by a ranking of the user's own."""
    best = n + more
    events = list(runner_of(MODEL).stream([request("a", prompt, 6, n=best, logprobs=0, **DRAWN)]))
    every = {sample_id("a", end.sample): end for end in of(Finished, events)}
    scores = dict.fromkeys(range(best), 0.0)
    for event in of(Decoded, events):
        scores[event.sample] += event.logprob or 0.0
    names = [sample_id("a", number) for number in range(best)]
    own = {}
    if ranked_by_user and more:
        scores = dict(enumerate(by_sum([every[name] for name in names])))
        own = {"ranking": {"path": f"{__name__}:by_sum"}}
    ranked = sorted(scores, key=lambda number: (-scores[number], number))
    runner = runner_of(MODEL, max_num_seqs=seqs)
    Poison(runner)
    done = generate(runner, [request("a", prompt, 6, n=n, best_of=best, **own, **DRAWN)])
    assert sorted(done) == sorted(names) and runner.scheduler.pages_in_use == 0
    if more == 0:
        assert {name: end.token_ids for name, end in done.items()} == {k: v.token_ids for k, v in every.items()}
        assert all(end.score is None for end in done.values())
        return
    assert [done[name].token_ids for name in names] == [every[names[number]].token_ids for number in ranked]
    assert [done[name].score for name in names] == pytest.approx([scores[number] for number in ranked], abs=1e-4)
    assert [done[name].reason for name in names] == ["length"] * n + ["not_chosen"] * more
    for name in names[n:]:
        assert "not chosen: number" in done[name].error and f"of {best}, with a score of" in done[name].error


def test_nothing_is_emitted_before_the_choice() -> None:
    recorder = Recorder()
    runner = runner_of(MODEL, listener=recorder.record)
    events = list(runner.stream([request("a", 6, 4, n=1, best_of=3, **DRAWN), request("b", 6, 9)]))
    mine = [event for event in events if event.request_id == "a" and not isinstance(event, Submitted)]
    first, last = events.index(mine[0]), events.index(mine[-1])
    assert all(event.request_id == "a" for event in events[first : last + 1]), "all at once"
    assert any(isinstance(event, Decoded) and event.request_id == "b" for event in events[:first])
    assert {event.sample for event in of(Decoded, mine)} == {0, 1, 2}
    times = [event.time for event in of(Decoded, mine)]
    assert times == sorted(times) and len(set(times)) == 4, "when it happened"
    rows = recorder.requests()
    assert [(r["request_id"], r["sample"], r["output_tokens"], r["finish_reason"]) for r in rows] == [
        ("a", 0, 4, "length"), ("a", 1, 4, "not_chosen"), ("a", 2, 4, "not_chosen"), ("b", 0, 9, "length"),
    ]  # fmt: skip


def test_samples_without_a_place_wait_on_the_prompts_pages() -> None:
    """Six samples on two places, without an index: the prompt is computed once."""
    runner = runner_of(MODEL, max_num_seqs=2, max_num_batched_tokens=64)
    Poison(runner)
    events = list(runner.stream([request("a", 14, 4, n=6, **DRAWN)]))
    ends = of(Finished, events)
    assert sorted(end.computed_tokens for end in ends) == [4] * 5 + [13 + 4]
    assert sorted(end.cached_tokens for end in ends) == [0] + [13] * 5
    reasons = [event.reason for event in events if isinstance(event, Scheduled) and event.action == "admitted"]
    assert any("13 tokens are in shared pages" in reason for reason in reasons)
    assert runner.scheduler.pages_in_use == 0


def test_who_waits_on_pages_gives_them_up_to_who_needs_them() -> None:
    alone = generate(runner_of(MODEL, pages=99), [request("a", 14, 8, n=6, **DRAWN)])
    runner = runner_of(MODEL, max_num_seqs=2, pages=7)
    Poison(runner)
    events = list(runner.stream([request("a", 14, 8, n=6, **DRAWN)]))
    ends = {event.sample: event for event in of(Finished, events)}
    assert any(isinstance(e, Preempted) and "a waiting request is preempted" in e.reason for e in events)
    assert [ends[k].token_ids for k in range(6)] == [end.token_ids for _, end in sorted(alone.items())]
    assert any(isinstance(event, Stepped) for event in events) and runner.scheduler.pages_in_use == 0


def test_it_is_given_the_texts_and_their_log_probabilities() -> None:
    seen: list[Finished] = []

    def note(samples: Sequence[Finished]) -> list[float]:
        seen.extend(samples)
        return [0.0] * len(samples)

    plain = generate(runner_of(MODEL), [request("a", 4, 5, best_of=3, **DRAWN)])
    with temporarily_registered(note) as path:
        done = generate(runner_of(MODEL), [request("a", 4, 5, best_of=3, ranking={"path": path}, **DRAWN)])
    assert [each.token_ids for each in seen] == [done[name].token_ids for name in ("a", "a#1", "a#2")]
    assert sorted(each.score or 0 for each in seen) == pytest.approx(sorted(end.score or 0 for end in plain.values()))
