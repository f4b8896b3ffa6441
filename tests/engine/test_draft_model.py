"""A draft model's own cache follows what the target accepts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import workbench
from compiled_kernels import Backend, backend_problems
from compiled_kernels.level import Level, available_levels, limited_to
from tests.engine.guesses import drafts, model_drafts, needs_mlir, plain, run_checked, tokens
from tests.engine.tiny import VOCAB, layer, model_of, request, runner_of, spec_of
from tests.helpers.rows import rows
from tests.sampling import exact as law
from workbench.engine.runner import generate
from workbench.executors.select import Backends
from workbench.request import Request, SamplingParameters, random_token_ids
from workbench.sampling.samplers import uniform
from workbench.sampling.verify import NO_DRAFT, Draft
from workbench.speculative.draft_model import DraftModelProposer, _DraftSequence
from workbench.trace.events import Finished, Verified


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_target_always_stands(temperature: float) -> None:
    model = model_of(spec_of(layer(), layer(sliding_window=9)))
    asked = [request(f"r{i}", 4 + 13 * i, 9 + 3 * i, temperature=temperature, top_k=20, seed=i) for i in range(3)]
    runner = runner_of(model, speculator=drafts(model_drafts(runner_of(model))))
    checks = [e for e in runner.stream(asked) if isinstance(e, Verified)]
    assert checks and all(check.accepted == check.drafted for check in checks)


class Follows:
    """A proposer whose drafts are held against what its model says to the whole text, computed anew: tokens, and where
    they end."""

    def __init__(self, inner: DraftModelProposer, model, every: int = 1):
        self.inner, self.model, self.every = inner, model, every
        self.drafted = self.calls = self.cut = 0

    def propose(self, sequences, counts) -> list[Draft]:
        self.calls += 1
        if self.calls % self.every:
            return [NO_DRAFT for _ in sequences]
        found = self.inner.propose(sequences, counts)
        for sequence, count, draft in zip(sequences, counts, found, strict=True):
            least = self.inner.confidence_threshold
            assert len(draft) == count or least
            for place, token in enumerate(draft.token_ids):
                logits = self.model.logits([*sequence.token_ids, *draft.token_ids[:place]])[-1]
                assert float(logits.max() - logits[token]) < 1e-4
                assert float(logits.softmax(-1).max()) > least - 1e-4
                self.drafted += 1
            if len(draft) < count:
                logits = self.model.logits([*sequence.token_ids, *draft.token_ids])[-1]
                assert float(logits.softmax(-1).max()) < least + 1e-4
                self.cut += 1
        return found

    def forget(self, request_id: str) -> None:
        self.inner.forget(request_id)


COMPILED = Backends(Backend.MLIR, Backend.EAGER, Backend.EAGER, "")
SHARED = 160  # a vocabulary of several vectors, of which each thread has some
SHARP = 2.5  # times a tiny model's own logits: its largest probabilities are then spread over (0.2, 1)


def sharp(seed: int, vocab: int = VOCAB, **more):
    """A draft model that is sure of some tokens and unsure of others."""
    model = model_of(spec_of(layer(), layer(sliding_window=9)).model_copy(update={"vocab_size": vocab}), seed)
    assert model.embedding is not None and model.norm.weight is not None
    with torch.no_grad():
        model.norm.weight.mul_(SHARP)
    return runner_of(model, **more)


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def runs(several: bool, **row: object) -> bool:
    return not several or backend_problems()[Backend.MLIR] is None


@rows(
    {"several": [False, True], "least": [0.0, 0.5, 0.88], "every": [1, 3], "most": [4, 1], "threads": [1, 2]},
    {"several": True, "least": 0.88}, {"several": True, "every": 3, "threads": 2},
    valid=runs,
)  # fmt: skip
def test_drafts_are_the_draft_models_own_and_change_nothing(several, least, every, most, threads) -> None:
    """Greedy: each draft is the model's own, up to the first token below the threshold, each row cut for itself, and
    outputs are those without; its cache follows what the target accepts, whether it was stopped or not."""
    target = model_of(spec_of(), 1)
    with threads_of_torch(threads):
        own = sharp(3, backends=COMPILED if several else None)
        proposer = Follows(model_drafts(own, several, confidence_threshold=least), own.model, every)
        asked = [request(f"r{i}", 2 + 17 * i, 20) for i in range(3)]
        runner = runner_of(target, speculator=drafts(proposer, most), max_num_seqs=2)
        assert tokens(run_checked(runner, asked)) == tokens(plain(target, asked))
    assert proposer.drafted and (proposer.cut > 0) == (least > 0)
    for each in asked:
        proposer.forget(each.request_id)
    assert all(pool.num_used == 0 for pool in own.scheduler.pools)


def test_a_draft_that_keeps_what_fell_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: its cache is never taken back."""

    def sync(self, token_ids):
        computed = self.own.num_computed_tokens
        right(self, token_ids)
        self.own.num_computed_tokens = min(computed, len(token_ids) - 1)

    right = _DraftSequence.sync
    monkeypatch.setattr(_DraftSequence, "sync", sync)
    small = model_of(spec_of(layer(), layer()), 2)
    runner = runner_of(model_of(spec_of(), 1), speculator=drafts(Follows(model_drafts(runner_of(small)), small, 3), 4))
    assert any("AssertionError" in end.error for end in generate(runner, [request("r", 19, 20)]).values())


def test_a_draft_without_pages_proposes_nothing() -> None:
    target = model_of(spec_of(), 1)
    own = runner_of(model_of(spec_of(), 2), pages=6)
    runner = runner_of(target, speculator=drafts(model_drafts(own)))
    asked = [request(f"r{i}", 12, 9) for i in range(3)]
    events = list(runner.stream(asked))
    assert {e.reason for e in events if isinstance(e, Finished)} == {"length"}
    assert any(isinstance(e, Verified) for e in events)


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=needs_mlir)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_thresholds_at_the_ends(several: bool, temperature: float) -> None:
    """0 proposes as ever; above 1 nothing is proposed; between them there are drafts of several lengths."""
    backends = COMPILED if several else None
    asked = [request(f"r{i}", 5 + 9 * i, 20, temperature=temperature, seed=i) for i in range(2)]
    target, lengths = model_of(spec_of(), 1), {}
    ends = {}
    for least in (None, 0.0, 0.5, 1.01):
        more = {} if least is None else {"confidence_threshold": least}
        runner = runner_of(target, speculator=drafts(model_drafts(sharp(3, backends=backends), several, **more), 4))
        events = list(runner.stream(asked))
        lengths[least] = [(e.token_ids, e.accepted) for e in events if isinstance(e, Verified)]
        ends[least] = tokens({e.request_id: e for e in events if isinstance(e, Finished)})
    assert lengths[None] == lengths[0.0] and ends[None] == ends[0.0]
    assert lengths[1.01] == [] and ends[1.01] == tokens(plain(target, asked))
    assert len({len(ids) for ids, _ in lengths[0.5]}) > 1


class Table:
    """An executor that knows the last token alone."""

    def forward(self, plan):
        return torch.stack([law.SMALL[span.token_ids[-1]] for span in plan.spans])


def two_drawn(way, least: float = 0.4) -> tuple[Counter, set[int]]:
    """Counts of two tokens where drafts of the table stop at what it is unsure of, and the lengths of those drafts."""
    runner = runner_of(model_of(spec_of()), pages=60)
    drafting = DraftModelProposer(runner.model.spec, Table(), runner.kv_cache.manager, 64, confidence_threshold=least)  # type: ignore[arg-type]
    lengths = set()

    def proposes(seed: int, output: tuple[int, ...]) -> Draft:
        sequence = law.sequence(way.model_copy(update={"seed": seed}), output, "r")
        found = drafting.propose([sequence], [2])[0]
        drafting.forget("r")
        lengths.add(len(found))
        return found

    return law.first_two(way, proposes), lengths


@pytest.mark.parametrize(("name", "least"), [("plain", 0.4), ("temperature", 0.52), ("top-k and top-p", 0.5)])
def test_sampled_drafts_that_stop_leave_the_targets_distribution(name: str, least: float) -> None:
    counts, lengths = two_drawn(law.WAYS[name], least)
    assert len(lengths) > 1
    assert law.chi_square_p(counts, law.expected(law.WAYS[name])) > law.LEVEL


def test_counting_catches_a_draft_that_leaves_out_tokens_for_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: it draws, and stops where the token drawn was unlikely."""

    def choose(self, ready, logits):
        least, self.confidence_threshold = self.confidence_threshold, 0.0
        right(self, ready, logits)
        self.confidence_threshold = least
        for each in ready:
            if float(each.chances[-1][each.own.token_ids[-1]]) < least:
                each.unsure = bool(each.own.token_ids.pop() >= 0)
                each.chances.pop()

    right = DraftModelProposer._choose
    monkeypatch.setattr(DraftModelProposer, "_choose", choose)
    counts, _ = two_drawn(law.WAYS["plain"])
    assert law.chi_square_p(counts, law.expected(law.WAYS["plain"])) < law.LEVEL


class Draws:
    """A proposer whose drawn drafts are held against the distribution function of its model, computed anew, and whose
    probabilities are those it says they were drawn from."""

    def __init__(self, inner: DraftModelProposer, model):
        self.inner, self.model, self.drawn = inner, model, 0

    def propose(self, sequences, counts) -> list[Draft]:
        found = self.inner.propose(sequences, counts)
        for sequence, draft in zip(sequences, found, strict=True):
            temperature = sequence.request.sampling.temperature
            for place, token in enumerate(draft.token_ids):
                logits = self.model.logits([*sequence.token_ids, *draft.token_ids[:place]])[-1].double()
                if not temperature:
                    assert draft.probabilities is None and float(logits.max() - logits[token]) < 1e-4
                    continue
                assert draft.probabilities is not None
                chances = (logits / temperature).softmax(-1)
                torch.testing.assert_close(draft.probabilities[place], chances, atol=1e-4, rtol=1e-3)
                share = uniform(sequence.request.sampling.seed, len(sequence.output_ids) + place, self.inner._use)
                reached = chances.cumsum(-1)
                assert reached[token] - chances[token] - 1e-4 <= share <= reached[token] + 1e-4
                self.drawn += 1
        return found

    def forget(self, request_id: str) -> None:
        self.inner.forget(request_id)


def draws_of_its_own(ways: tuple[float, ...], common: bool, least: float, threads: int, vocab: int) -> int:
    """Return how many tokens were drawn, each held against the distribution function; outputs are those without drafts
    where random numbers are common."""
    with threads_of_torch(threads):
        own = sharp(3, vocab, backends=COMPILED)
        proposer = Draws(model_drafts(own, True, common_random_numbers=common, confidence_threshold=least), own.model)
        asked = [request(f"r{i}", 4 + 9 * i, 14, temperature=way, seed=5 + i) for i, way in enumerate(ways)]
        target = model_of(spec_of().model_copy(update={"vocab_size": vocab}), 1)
        accept = "match" if common else "rejection"
        found = generate(runner_of(target, speculator=drafts(proposer, 4, accept=accept), max_num_seqs=3), asked)
    assert {end.reason for end in found.values()} == {"length"}, [end.error for end in found.values()]
    assert not common or tokens(found) == tokens(plain(target, asked))
    return proposer.drawn


@needs_mlir
@rows({
    "ways": [(0.5, 1.0, 2.0), (0.0, 1.0, 0.0), (1.0,)], "common": [False, True], "least": [0.0, 0.6],
    "threads": [1, 2, 3], "vocab": [VOCAB, SHARED],
})  # fmt: skip
def test_tokens_drawn_in_one_call_are_those_of_the_distribution_function(ways, common, least, threads, vocab) -> None:
    """Rows that draw, each at its temperature, beside rows that take the largest; cut where the draft is unsure."""
    assert draws_of_its_own(ways, common, least, threads, vocab) or least


@pytest.mark.levels
@needs_mlir
@pytest.mark.parametrize("level", available_levels()[:-1], ids=str)
def test_drawn_drafts_at_every_level(level: Level) -> None:
    with limited_to(level):
        assert draws_of_its_own((0.7, 0.7, 0.7), False, 0.0, 1, SHARED) > 20


@needs_mlir
def test_a_compiled_step_may_have_no_row_that_samples() -> None:
    """A draft that ended early has tokens behind it whose logits are not read: after this prompt all of a step."""
    stop = {"path": "experiments/zoo/adaedl.py:EntropyBound"}
    ids = random_token_ids(random.Random(1), 2048, 384)
    texts = []
    for speculate in (None, {"kind": "draft", "num_speculative_tokens": 8, "stop": stop}):
        runner = workbench.load("demo", backend="mlir", dtype="float32", speculate=speculate)
        request = Request("a", ids, SamplingParameters(temperature=0, max_tokens=40, ignore_eos=True))
        (end,) = [event for event in runner.stream([request]) if isinstance(event, Finished)]
        texts.append(end.token_ids)
    assert texts[0] == texts[1]
