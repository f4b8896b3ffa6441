"""A draft model's own cache follows what the target accepts."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

import workbench
from compiled_kernels import Backend, backend_problems
from compiled_kernels.level import Level, available_levels, limited_to
from tests.engine.guesses import drafts, model_drafts, needs_mlir, plain, run_checked, tokens
from tests.engine.tiny import VOCAB, layer, model_of, request, runner_of, spec_of
from tests.helpers.events import of
from tests.helpers.kernels import on_threads
from tests.helpers.rows import rows
from tests.sampling import exact as law
from workbench.engine.runner import generate
from workbench.executors.select import Backends
from workbench.request import Request, SamplingParameters, Sequence, random_token_ids
from workbench.sampling.samplers import uniform
from workbench.sampling.verify import NO_DRAFT, Draft
from workbench.speculative.draft_model import DraftModelProposer
from workbench.trace.events import Finished, Verified


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_target_always_stands(temperature: float) -> None:
    model = model_of(spec_of(layer(), layer(sliding_window=9)))
    asked = [request(f"r{i}", 4 + 13 * i, 9 + 3 * i, temperature=temperature, top_k=20, seed=i) for i in range(3)]
    runner = runner_of(model, speculator=drafts(model_drafts(runner_of(model))))
    checks = of(Verified, runner.stream(asked))
    assert checks and all(check.accepted == check.drafted for check in checks)


class Held:
    """A proposer whose drafts are held against what its model says to the whole text, computed anew: the largest token,
    or the one that the distribution function draws, and where drafts end."""

    def __init__(self, inner: DraftModelProposer, model, every: int = 1):
        self.inner, self.model, self.every, self.forget = inner, model, every, inner.forget
        self.drafted = self.drawn = self.calls = self.cut = 0

    def propose(self, sequences, counts) -> list[Draft]:
        self.calls += 1
        if self.calls % self.every:
            return [NO_DRAFT for _ in sequences]
        found = self.inner.propose(sequences, counts)
        for sequence, count, draft in zip(sequences, counts, found, strict=True):
            least = self.inner.confidence_threshold
            assert len(draft) == count or least
            for place in range(len(draft) + 1):
                logits = self.model.logits([*sequence.token_ids, *draft.token_ids[:place]])[-1].double()
                sure = float(logits.softmax(-1).max())
                if place == len(draft):
                    self.cut += len(draft) < count
                    assert len(draft) == count or sequence.request.sampling.temperature or sure < least + 1e-4
                elif sequence.request.sampling.temperature:
                    self.check_drawn(sequence, draft, place, logits)
                else:
                    assert draft.probabilities is None and sure > least - 1e-4
                    assert float(logits.max() - logits[draft.token_ids[place]]) < 1e-4
                    self.drafted += 1
        return found

    def check_drawn(self, sequence: Sequence, draft: Draft, place: int, logits: torch.Tensor) -> None:
        assert draft.probabilities is not None
        sampling, token = sequence.request.sampling, draft.token_ids[place]
        chances = (logits / sampling.temperature).softmax(-1)
        torch.testing.assert_close(draft.probabilities[place], chances, atol=1e-4, rtol=1e-3)
        share = uniform(sampling.seed, len(sequence.output_ids) + place, self.inner._use)
        reached = chances.cumsum(-1)
        assert reached[token] - chances[token] - 1e-4 <= share <= reached[token] + 1e-4
        self.drawn += 1


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


def runs(several: bool, **row: object) -> bool:
    return not several or backend_problems()[Backend.MLIR] is None


@rows(
    {"several": [False, True], "least": [0.0, 0.5, 0.88, 1.01], "every": [1, 3], "most": [4, 1], "threads": [1, 2]},
    {"several": True, "least": 0.88}, {"several": True, "every": 3, "threads": 2},
    valid=runs,
)  # fmt: skip
def test_drafts_are_the_draft_models_own_and_change_nothing(several, least, every, most, threads) -> None:
    """Greedy: each draft is the model's own, up to the first token below the threshold, of which there are drafts of no
    token, each row cut for itself, and outputs are those without; its cache follows what the target accepts."""
    target = model_of(spec_of(), 1)
    with on_threads(threads):
        own = sharp(3, backends=COMPILED if several else None)
        proposer = Held(model_drafts(own, several, confidence_threshold=least), own.model, every)
        asked = [request(f"r{i}", 2 + 17 * i, 20) for i in range(3)]
        runner = runner_of(target, speculator=drafts(proposer, most), max_num_seqs=2)
        assert tokens(run_checked(runner, asked)) == tokens(plain(target, asked))
    assert (proposer.drafted > 0) == (least < 1) and (proposer.cut > 0) == (least > 0)
    for each in asked:
        proposer.forget(each.request_id)
    assert all(pool.num_used == 0 for pool in own.scheduler.pools)


def test_a_draft_without_pages_proposes_nothing() -> None:
    target = model_of(spec_of(), 1)
    own = runner_of(model_of(spec_of(), 2), pages=6)
    runner = runner_of(target, speculator=drafts(model_drafts(own)))
    asked = [request(f"r{i}", 12, 9) for i in range(3)]
    events = list(runner.stream(asked))
    assert {e.reason for e in of(Finished, events)} == {"length"}
    assert any(isinstance(e, Verified) for e in events)


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


def draws_of_its_own(ways: tuple[float, ...], common: bool, least: float, threads: int, vocab: int) -> int:
    """Return how many tokens were drawn, each held against the distribution function; outputs are those without drafts
    where random numbers are common."""
    with on_threads(threads):
        own = sharp(3, vocab, backends=COMPILED)
        proposer = Held(model_drafts(own, True, common_random_numbers=common, confidence_threshold=least), own.model)
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
        (end,) = of(Finished, runner.stream([request]))
        texts.append(end.token_ids)
    assert texts[0] == texts[1]
