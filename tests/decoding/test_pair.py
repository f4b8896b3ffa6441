"""Filters that combine the logits of a second stream: it is the model after another prompt and the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.at_rest import at_rest
from tests.engine.poison import MODEL, Poison, asked
from tests.engine.tiny import CONTEXT, VOCAB, request, runner_of, with_filter
from tests.helpers.events import of
from tests.thorough import tries
from workbench.custom import temporarily_registered
from workbench.engine.runner import Runner, generate
from workbench.oracle import naive
from workbench.request import Request
from workbench.sampling.filters import History
from workbench.scheduler.policy import SchedulerDecision, SchedulerState
from workbench.speculative.proposers import PromptLookupProposer, Speculator
from workbench.trace.events import Event, Finished, Preempted, StepPlanned
from workbench.trace.recorder import Recorder


@dataclass(frozen=True)
class Guided:
    """The second prompt is the last `keep` tokens, backwards, `extra` of a token before them."""

    keep: int = 1
    extra: int = 0
    weight: float = 2.0

    def second_prompt(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        return (*[3] * self.extra, *reversed(prompt_ids[-self.keep :]))

    def __call__(self, logits: Tensor, histories: Sequence[History], second: Tensor) -> Tensor:
        return second + self.weight * (logits - second)


def plainly(made: Request, part: Guided) -> list[int]:
    """Greedy tokens by the oracle, one text at a time."""
    first, second, found = list(made.prompt_ids), list(part.second_prompt(made.prompt_ids)), []
    for _ in range(made.sampling.max_tokens):
        rows = [naive.logits(MODEL, torch.tensor([*ids, *found]))[-1:] for ids in (first, second)]
        found.append(int(part(rows[0], [], rows[1])[0].argmax()))
    return found


prompts = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 9), st.integers(1, 6), st.booleans()), min_size=1, max_size=4
)


@settings(max_examples=tries(20))
@given(prompts, st.integers(1, 8), st.integers(0, 9), st.integers(2, 16), st.integers(2, 4), st.integers(12, 30),
       st.sampled_from(["off", "radix"]))  # fmt: skip
def test_the_tokens_are_those_of_the_oracle(
    given: list, keep: int, extra: int, chunk: int, seqs: int, pages: int, prefix: str
) -> None:
    """In any batch, in chunks, after cached prefixes and preemptions, beside requests without a second stream."""
    part = Guided(keep, extra)
    runner = runner_of(MODEL, pages=pages, max_num_batched_tokens=chunk, max_num_seqs=seqs, prefix=prefix)
    Poison(runner)
    plain = [asked(f"r{i}", *each[:3]) for i, each in enumerate(given)]
    with temporarily_registered(part) as path:
        requests = [with_filter(each, path) if it[3] else each for each, it in zip(plain, given, strict=True)]
        done = generate(runner, requests)
    assert done.keys() == {each.request_id for each in plain}, "a second stream is no output"
    for each, (*_, guided) in zip(plain, given, strict=True):
        expected = plainly(each, part if guided else Guided(weight=1.0))
        assert list(done[each.request_id].token_ids) == expected, each.request_id
    assert runner.scheduler.pages_in_use == 0 and not runner.tracker.sequences and not runner.core.decoder.methods


def events_of(runner: Runner, requests: list[Request]) -> list[Event]:
    recorder = Recorder()
    runner.set_listener(recorder.record)
    list(runner.stream(requests))
    return recorder.events


def test_both_are_preempted_and_come_back_together() -> None:
    part = Guided(keep=4)
    with temporarily_registered(part) as path:
        requests = [with_filter(request(f"r{i}", 6, 14), path) for i in range(2)]
        events = events_of(runner_of(MODEL, pages=14), requests)
    preempted = of(Preempted, events)
    assert preempted and {event.request_id for event in preempted} <= {"r0", "r1"}
    ends = {event.request_id: event for event in of(Finished, events)}
    for each in requests:
        assert list(ends[each.request_id].token_ids) == plainly(each, part)
    for step in of(StepPlanned, events):
        decodes = [span.sequence for span in step.spans if span.tokens == 1]
        firsts = [name for name in decodes if not name.endswith("+second")]
        assert sorted(decodes) == sorted([*firsts, *(f"{name}+second" for name in firsts)]), "no step with one of both"


def test_no_event_speaks_of_it_and_samples_have_one_each() -> None:
    with temporarily_registered(Guided()) as path:
        wanted = with_filter(request("a", 5, 6, n=3, temperature=1.0, seed=4), path)
        runner = runner_of(MODEL, max_num_seqs=6)
        events = events_of(runner, [wanted])
        drawn = [with_filter(request("a", 5, 6, temperature=1.0, seed=seed), path) for seed in (4, 5, 6)]
        alone = [generate(runner_of(MODEL), [each])["a"].token_ids for each in drawn]
    assert {event.request_id for event in events if event.request_id} == {"a"}
    ends = sorted((event for event in events if isinstance(event, Finished)), key=lambda end: end.sample)
    assert [end.token_ids for end in ends] == alone


def test_a_cancelled_second_stream_is_an_unknown_id() -> None:
    part = Guided()
    with temporarily_registered(part) as path:
        runner, wanted = runner_of(MODEL), with_filter(request("a", 5, 6), path)
        runner.set_listener(lambda event: runner.cancel("a+second"))
        done = generate(runner, [wanted])
    assert list(done["a"].token_ids) == plainly(wanted, part)


def test_samples_that_an_event_of_the_first_cancels_leave_nothing() -> None:
    """Both pairs have their rows when the first emits a token; its client goes, and the second is asked for none."""
    with temporarily_registered(Guided()) as path:
        runner = runner_of(MODEL, max_num_seqs=4)
        runner.set_listener(lambda event: runner.cancel("a") if event.kind == "decoded" else None)
        runner.submit(with_filter(request("a", 5, 6, n=2), path))
        while runner.has_unfinished_requests:
            runner.step()
    at_rest(runner)


def test_it_finds_its_prefix_in_the_cache() -> None:
    part = Guided(keep=12)
    with temporarily_registered(part) as path:
        runner = runner_of(MODEL, prefix="radix")
        first = events_of(runner, [with_filter(request("a", 13, 4), path)])
        again = events_of(runner, [replace(with_filter(request("a", 13, 4), path), request_id="b")])
    computed = [sum(span.tokens for event in of(StepPlanned, events) for span in event.spans)
                for events in (first, again)]  # fmt: skip
    assert computed == [31, 31 - 12 - 8], "full pages of four tokens of both prompts, but for their last tokens"


def test_drafts_are_for_others_alone() -> None:
    part = Guided()
    with temporarily_registered(part) as path:
        requests = [with_filter(request("a", 8, 12), path), request("b", 8, 20)]
        drafts = Speculator(PromptLookupProposer(1, 3), 3, CONTEXT, "fixed", "rejection")
        events = events_of(runner_of(MODEL, speculator=drafts), requests)
    ends = {event.request_id: list(event.token_ids) for event in of(Finished, events)}
    assert ends == {"a": plainly(requests[0], part), "b": plainly(requests[1], Guided(weight=1.0))}
    spans = [span for event in of(StepPlanned, events) for span in event.spans]
    assert {span.sequence for span in spans if span.drafted} == {"b"}


def test_a_policy_that_likes_short_prompts_does_not_part_them() -> None:
    """Every second stream would come before every first one, and none would ever be done."""

    def shortest(state: SchedulerState) -> SchedulerDecision:
        order = sorted([*state.running, *state.waiting], key=lambda each: (not each.is_running, each.num_prompt_tokens))
        return SchedulerDecision(order)

    part = Guided()
    with temporarily_registered(part) as path:
        runner = runner_of(MODEL, max_num_seqs=3)
        runner.scheduler.set_policy(shortest)  # type: ignore[arg-type] (a function is a policy)
        requests = [with_filter(request(f"r{i}", 4 + i, 5), path) for i in range(4)]
        done = generate(runner, requests)
    assert {k: list(v.token_ids) for k, v in done.items()} == {r.request_id: plainly(r, part) for r in requests}


@pytest.mark.parametrize(
    ("second_prompt", "more", "words"),
    [
        (lambda self, ids: (), {}, "second_prompt must return at least one token id"),
        (lambda self, ids: (VOCAB,), {}, f"prompt has token id {VOCAB}"),
        (lambda self, ids: 1 / 0, {}, "second_prompt: ZeroDivisionError"),
        (lambda self, ids: (1,) * CONTEXT, {}, "prompt tokens leave no room in a context"),
        (lambda self, ids: (1,), {"max_num_seqs": 1}, "second stream is another sequence, and max_num_seqs is 1"),
        (lambda self, ids: (1,) * 20, {"pages": 6}, "and its second stream, need"),
    ],
)
def test_what_cannot_be_is_refused(monkeypatch, second_prompt, more: dict, words: str) -> None:
    monkeypatch.setattr(Guided, "second_prompt", second_prompt)
    with temporarily_registered(Guided()) as path:
        runner = runner_of(MODEL, **more)
        done = generate(runner, [with_filter(request("a", 5, 4), path), request("b", 5, 4)])
    assert done["a"].reason == "refused" and words in done["a"].error and done["b"].reason == "length"
    assert runner.scheduler.pages_in_use == 0 and not runner.core.decoder.methods and not runner.tracker.sequences


def test_a_longer_second_prompt_ends_the_text_where_it_is_full() -> None:
    with temporarily_registered(Guided(keep=5, extra=30)) as path:
        done = generate(runner_of(MODEL), [with_filter(request("a", 5, 99), path)])
    assert (done["a"].reason, done["a"].ended_by, len(done["a"].token_ids)) == ("length", "context", CONTEXT - 35)
