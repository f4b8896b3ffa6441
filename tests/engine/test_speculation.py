"""Speculation is invisible: the same tokens, the same rows, the same pages, whatever is proposed."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import Lane, lane_problems
from tests.engine.tiny import CONTEXT, VOCAB, Oracle, layer, model_of, request, runner_of, spec_of, specs
from workbench.cache.format import CacheFormat
from workbench.cache.holdings import Holdings
from workbench.cache.pages import pages_for
from workbench.engine.draft_model import ModelDrafts, _Followed
from workbench.engine.drafting import check_same_tokens
from workbench.engine.drafts import Drafts
from workbench.engine.lanes import Lanes
from workbench.engine.load import DEMO, load
from workbench.engine.lookup import LookupDrafts
from workbench.engine.mlir_drafts import GreedySteps
from workbench.engine.plan import Span
from workbench.engine.runner import Runner, generate
from workbench.engine.speculation import speculation_from
from workbench.errors import WorkbenchError
from workbench.model.spec import ModelSpec
from workbench.prompt.tokenizer import Tokenizer
from workbench.request import Request, Sequence
from workbench.sampling import choose
from workbench.sampling.choice import Choice
from workbench.sampling.verify import NO_DRAFT, Draft
from workbench.trace.events import Decoded, Finished, Stepped, Verified

PACKED = CacheFormat(format="int8", group=8, columns=8, residual=8)
needs_mlir = pytest.mark.skipif(lane_problems()[Lane.MLIR] is not None, reason=f"{lane_problems()[Lane.MLIR]}")


class Guesses:
    """Proposes what will come, from `answers`, or something else, as dice have it; seldom fewer than asked for."""

    def __init__(self, answers: dict[str, tuple[int, ...]], seed: int = 0, right: float = 0.7):
        self.answers, self.dice, self.right = answers, random.Random(seed), right
        self.kept: set[str] = set()

    def propose(self, sequences, counts) -> list[Draft]:
        self.kept |= {sequence.request_id for sequence in sequences}
        return [self._guess(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def _guess(self, sequence: Sequence, count: int) -> Draft:
        coming = self.answers[sequence.request_id][len(sequence.output_ids) :][:count]
        said = [t if self.dice.random() < self.right else self.dice.randrange(VOCAB) for t in coming]
        return Draft(tuple(said[: self.dice.choice([count, count, 1])]))

    def forget(self, request_id: str) -> None:
        self.kept.discard(request_id)


def drafts(proposer, most: int = 3, **more) -> Drafts:
    return Drafts(proposer, most, CONTEXT, **more)


def plain(model, requests, **settings) -> dict[str, Finished]:
    return generate(runner_of(model, **settings), requests)


def tokens(ends: dict[str, Finished]) -> dict[str, tuple]:
    return {name: (end.token_ids, end.reason, end.output_text) for name, end in ends.items()}


def check_pages(runner: Runner) -> None:
    """Nobody holds a page beyond what known tokens need, with everybody committed."""
    holdings = runner.cache.holdings
    for sequence in runner.scheduler.running:
        for table, pages in zip(holdings.tables, sequence.pages, strict=True):
            assert len(pages) <= pages_for(table.settled(len(sequence.token_ids)), holdings.size)


def run_checked(runner: Runner, requests) -> dict[str, Finished]:
    box: deque = deque()
    for each in requests:
        runner.submit(each, box)
    while runner.busy:
        runner.step(box)
        check_pages(runner)
    return {event.request_id: event for event in box if isinstance(event, Finished)}


@settings(max_examples=15, deadline=None)
@given(
    specs, st.integers(0, 2**31), st.integers(1, 5), st.sampled_from([None, PACKED]), st.sampled_from(["off", "radix"]),
    st.integers(5, 40), st.floats(0, 1),
)  # fmt: skip
def test_greedy_output_is_what_it_is_without(spec: ModelSpec, seed, most, cache, prefix, pages, right) -> None:
    """Windows, packed caches, reuse of prefixes, pages that run out, chunks that are cut: every row is the oracle's, or
    that of a run without drafts where the cache is packed, and no page is left over."""
    if cache is not None and any(kind.attention.dim % 8 for kind in spec.layers):
        cache = None
    size = 8 if cache else 4
    pages = max(pages, 2 * pages_for(30, size) + 4)
    model = model_of(spec, seed)
    asked = [request(f"{seed}-{i}", 3 + 4 * i, 5 + 3 * i, presence_penalty=0.3 * (i % 2)) for i in range(3)]
    asked.append(Request("again", asked[2].prompt_ids, asked[2].sampling))
    shared = {"cache": cache, "prefix": prefix, "pages": pages, "page_size": size, "max_num_seqs": 3}
    wanted = plain(model, asked, **{**shared, "pages": 60})
    proposer = Guesses({name: end.token_ids for name, end in wanted.items()}, seed, right)
    runner = runner_of(model, **shared, drafts=drafts(proposer, most))
    if cache is None:
        Oracle(runner)
    assert tokens(run_checked(runner, asked)) == tokens(wanted)
    runner.forget_prefixes()
    assert all(pool.used == 0 and pool.free == pool.pages for pool in runner.scheduler.pools)


def keeps_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holdings, "cut", lambda self, sequence: None)


def takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every drafted token stands."""

    def greedy(draft, rows, largest, tokens):
        return [*map(Choice, draft.token_ids), Choice(tokens[rows[-1]])]

    monkeypatch.setattr(choose, "_greedy", greedy)


def one_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each drafted token is computed a place too early."""
    wrong = property(lambda s: [*s.sequence.token_ids[s.start : s.end - len(s.drafts)], *s.drafts[1:], *s.drafts[:1]])
    monkeypatch.setattr(Span, "ids", wrong)


@pytest.mark.parametrize("bug", [keeps_pages, takes_all, one_off])
def test_planted_bugs_are_seen(bug, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = model_of(spec_of()), [request("a", 5, 20), request("b", 9, 20)]
    wanted = plain(model, asked)

    def same() -> bool:
        proposer = Guesses({name: end.token_ids for name, end in wanted.items()})
        return tokens(run_checked(runner_of(model, drafts=drafts(proposer)), asked)) == tokens(wanted)

    assert same()
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        assert same()


@pytest.mark.parametrize("way", [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 9, "logprobs": 2}])
def test_events_are_those_of_a_run_without(way: dict) -> None:
    """Token for token and in order, where drafts stand by match; stop tokens, limits and samples among them."""
    model = model_of(spec_of(layer(), layer(window=9)))
    asked = [request(f"r{i}", 4 + i, 9 + i, seed=i, stop_token_ids=(i, 7), **way) for i in range(4)]
    asked.append(request("many", 6, 8, seed=9, n=3, **way))
    wanted = list(runner_of(model).stream(asked))
    answers = {
        f"{e.request_id}#{e.sample}" if e.sample else e.request_id: e.token_ids
        for e in wanted
        if isinstance(e, Finished)
    }
    found = list(runner_of(model, drafts=drafts(Guesses(answers), accept="match")).stream(asked))

    def told(events) -> dict:
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

    assert told(found) == told(wanted) and ends(found) == ends(wanted)
    checks = [e for e in found if isinstance(e, Verified)]
    steps = [e for e in found if isinstance(e, Stepped)]
    assert sum(e.accepted for e in checks) == sum(e.accepted_tokens for e in steps) > 0
    assert sum(e.drafted for e in checks) == sum(e.drafted_tokens for e in steps)
    assert all(0 <= e.accepted <= e.drafted <= 3 for e in checks)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 60), st.integers(0, 2), st.integers(0, 9))
def test_cancelling_at_any_event_frees_its_pages(moment: int, which: int, seed: int) -> None:
    model = model_of(spec_of())
    asked = [request(f"r{i}", 3 + 4 * i, 9) for i in range(3)]
    wanted = plain(model, asked)
    proposer = Guesses({name: end.token_ids for name, end in wanted.items()}, seed)
    runner = runner_of(model, drafts=drafts(proposer))
    ends = {}
    for number, event in enumerate(runner.stream(asked)):
        if number == moment:
            runner.cancel(f"r{which}")
        if isinstance(event, Finished):
            ends[event.request_id] = event
    assert all(pool.used == 0 for pool in runner.scheduler.pools)
    for name, end in ends.items():
        cut = end.reason == "cancelled"
        assert end.token_ids == wanted[name].token_ids[: len(end.token_ids) if cut else None]
    generate(runner, [request("r0", 3, 2)])
    assert proposer.kept <= {"r0"}  # what has ended is forgotten


def test_rows_of_one_sequence_are_the_span() -> None:
    runner = runner_of(model_of(spec_of(layer(), layer(window=5))))
    own = Sequence.of(request("a", 9, 5), 0)
    runner.scheduler.submit(own)
    plan = runner.scheduler.plan()
    assert plan is not None
    runner.executor.forward(plan)
    runner.scheduler.commit(plan, {"a": 3})
    check = runner.scheduler.plan({"a": (4, 5, 6)})
    assert check is not None and [(s.length, s.drafts) for s in check.spans] == [(4, (4, 5, 6))]
    whole = runner.executor.forward(check)
    rows = check.by_rows()
    assert [(s.start, s.length, s.ids) for s in rows.spans] == [(9, 1, [3]), (10, 1, [4]), (11, 1, [5]), (12, 1, [6])]
    torch.testing.assert_close(runner.executor.forward(rows), whole)
    assert check.by_rows(3) is check


@needs_mlir
def test_checks_in_the_compiled_step_are_the_oracles() -> None:
    """Rows of one sequence beside another's, over several kinds of layer."""
    kinds = layer(4, 2, bias=True), layer(4, 2, window=5, sinks=2, softcap=1.5), layer(2, 1, dim=6, qk_norm=True)
    model = model_of(spec_of(*kinds))
    asked = [request(f"r{i}", 3 + 9 * i, 9 + i) for i in range(2)]
    wanted = plain(model, asked)
    proposer = Guesses({name: end.token_ids for name, end in wanted.items()})
    mixed = Lanes(Lane.MLIR, Lane.EAGER, Lane.EAGER, "decode steps alone are compiled")
    runner = runner_of(model, lanes=mixed, drafts=drafts(proposer, 2))
    Oracle(runner)
    assert tokens(generate(runner, asked)) == tokens(wanted)
    assert runner.executor.inner.checks  # type: ignore[attr-defined]


@needs_mlir
@pytest.mark.parametrize("threads", [1, 2])
def test_packed_pages_and_shared_contexts_in_the_compiled_step(threads: int) -> None:
    model = model_of(spec_of(layer(4, 2, dim=8), layer(4, 2, dim=8, window=20)))
    asked = [request("r", 20, 12)]
    shared = {"cache": PACKED, "page_size": 8}
    wanted = plain(model, asked, **shared)
    proposer = Guesses({name: end.token_ids for name, end in wanted.items()})
    mixed = Lanes(Lane.MLIR, Lane.EAGER, Lane.EAGER, "decode steps alone are compiled")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runner = runner_of(model, lanes=mixed, drafts=drafts(proposer), **shared)
        assert tokens(generate(runner, asked)) == tokens(wanted)
        assert runner.executor.checks  # type: ignore[attr-defined]
    finally:
        torch.set_num_threads(before)


# Draft models.


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


# Prompt lookup, lengths, settings.


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 3), st.integers(0, 2), st.integers(1, 6))
def test_lookup_copies_what_followed_the_latest_longest_match(ids, least, more, count) -> None:
    proposer = LookupDrafts(least, least + more)
    sequence = Sequence.of(Request("a", tuple(ids[:1])), 0)
    for end in range(2, len(ids) + 1):  # as it grows, whatever is entered on the way
        sequence.token_ids = ids[:end]
        found = proposer.propose([sequence], [count])[0].token_ids
    for length in range(least + more, least - 1, -1):
        places = [p for p in range(length, len(ids)) if ids[p - length : p] == ids[-length:] and length <= len(ids)]
        if places:
            copied = list(ids)
            for _ in range(count):
                copied.append(copied[places[-1] + len(copied) - len(ids)])
            assert list(found) == copied[len(ids) :]
            return
    assert found == ()


def test_adaptive_lengths_grow_by_two_and_shrink_by_one() -> None:
    ours = drafts(Guesses({"a": tuple(range(30))}, right=1.0), 5, length="adaptive")
    own = Sequence.of(request("a", 4, 40), 0)
    own.token_ids.append(0)
    own.computed = 4
    seen = []
    for accepted in ("none", "none", "none", "none", "none", "all", "all", "none"):
        drafted = ours._count(own)
        seen.append(drafted)
        ours.checked("a", drafted, drafted if accepted == "all" else 0)
    assert seen == [5, 4, 3, 2, 1, 1, 3, 5]


def test_no_more_is_drafted_than_the_request_can_use() -> None:
    asked = request("a", 4, 6)
    wanted = plain(model_of(spec_of()), [asked])
    runner = runner_of(model_of(spec_of()), drafts=drafts(Guesses({"a": wanted["a"].token_ids}, right=1.0), 9))
    checks = [e for e in runner.stream([asked]) if isinstance(e, Verified)]
    assert sum(check.drafted for check in checks) <= 4 and tokens(generate(runner, [asked])) == tokens(wanted)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("drafts", "speculate: .*'drafts'.*prompt_lookup"),
        ({"kind": "draft", "num_speculative_tokens": 0}, "num_speculative_tokens: .*greater than or equal to 1"),
        ({"kind": "prompt_lookup", "min_ngram": 5}, "min_ngram 5 is above max_ngram 4"),
        ({"kind": "draft", "tokens": 4}, "tokens: Extra inputs"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, words: str) -> None:
    with pytest.raises(WorkbenchError, match=words) as caught:
        speculation_from(given)
    assert "\n" not in str(caught.value)


def test_another_tokenizer_is_refused_in_one_line() -> None:
    ours, other = (Tokenizer.from_folder(DEMO / name) for name in ("target", "bytes"))
    spec = spec_of()
    with pytest.raises(
        WorkbenchError, match="a draft must have the target's tokenizer; token .* is .* there"
    ) as caught:
        check_same_tokens("bytes", other, spec, ours, spec)
    assert "\n" not in str(caught.value)
    check_same_tokens("target", ours, spec, ours, spec)
    with pytest.raises(WorkbenchError, match="it has none at all"):
        check_same_tokens("x", None, spec, ours, spec)
    with pytest.raises(WorkbenchError, match="vocabulary has 128256 tokens"):
        check_same_tokens("x", None, spec.model_copy(update={"vocab": 128256}), ours, spec)


def test_load_speculates() -> None:
    runner = load("demo", lane="eager", pages=8, speculate="draft")
    assert runner.drafts is not None and runner.drafts.most == 4
    sampling = {"max_tokens": 24, "temperature": 0}
    text = [e.output_text for e in runner.stream("import os\n", **sampling) if isinstance(e, Finished)]
    runner.drafts = None
    assert text == [e.output_text for e in runner.stream("import os\n", **sampling) if isinstance(e, Finished)]
