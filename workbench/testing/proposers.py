"""Check a proposer of draft tokens against its laws: its drafts must not change the target's text.

The target is a demo model in float64 on the backend eager, so that only a broken law makes a difference. Texts are
repetitive, requests share a batch, and in some scenarios pages run out, so that sequences are preempted during
speculation.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner
from workbench.model.transformer import Transformer
from workbench.request import Request, SamplingParameters, Sequence
from workbench.sampling.verify import Draft
from workbench.speculative.config import NoSpeculation, Speculation, parse_speculation
from workbench.testing.law import ConformityReport, LawBroken, check_law
from workbench.trace.events import Event, Finished, Verified

PAGE_SIZE, MAX_SEQS, MAX_BATCHED_TOKENS = 8, 3, 40
TEXTS = (
    "def add(first, second):\n    return first + second\n\n\ndef subtract(first, second):\n    return first",
    "import os\nimport sys\nimport os\nimport sys\nimport os\nimport",
    "class Node:\n    def __init__(self, value):\n        self.value = value\n        self.next = None\n",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n",
    "x = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1,",
)
NUM_SAMPLES, SAMPLED_TOKENS, TOP_K = 192, 3, 2  # for the sampling law, which counts every outcome
SIGNIFICANCE = 1e-6  # probability that the sampling law rejects a correct proposer


@dataclass(frozen=True)
class DraftScenario:
    """Requests on a small engine. `texts` are indices into TEXTS; `pages` may be fewer than all requests need."""

    texts: tuple[int, ...]
    output_tokens: int
    pages: int
    model: str = "demo-draft"

    def __repr__(self) -> str:
        return f"texts {self.texts}, {self.output_tokens} tokens each, {self.pages} pages of {PAGE_SIZE} tokens"

    def requests(self) -> list[Request]:
        tokenizer = _target(self.model).tokenizer
        assert tokenizer is not None
        greedy = SamplingParameters(max_tokens=self.output_tokens, temperature=0, ignore_eos=True)
        return [
            Request(f"request {i}", tuple(tokenizer.encode(TEXTS[text])), greedy) for i, text in enumerate(self.texts)
        ]

    def runner(
        self, speculate: Speculation, listener: Callable[[Event], None] | None = None, program: Any = None
    ) -> Runner:
        config = EngineConfig.build(
            self.model, dtype="float64", backend="eager", page_size=PAGE_SIZE, pages=self.pages, max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=MAX_BATCHED_TOKENS, prefix="radix", speculate=speculate,
            program=program,
        )  # fmt: skip
        return Runner(config, _target(self.model), listener=listener)


def draft_scenarios(pages: st.SearchStrategy[int], min_texts: int = 1) -> st.SearchStrategy[DraftScenario]:
    texts = st.lists(st.integers(0, len(TEXTS) - 1), min_size=min_texts, max_size=4).map(tuple)
    return st.builds(DraftScenario, texts, st.integers(8, 24), pages)


PLENTY_OF_PAGES = draft_scenarios(st.just(64))
SCARCE_PAGES = draft_scenarios(st.integers(8, 11), min_texts=3)  # a single text needs up to 8 pages


class RecordedProposer:
    """A proposer that calls another one and records its calls and drafts."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.drafts: list[tuple[str, int, tuple[int, ...]]] = []
        self.ids: set[str] = set()
        if hasattr(inner, "observed_top_k"):
            self.observed_top_k, self.observe = inner.observed_top_k, inner.observe

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]:
        before = [list(sequence.token_ids) for sequence in sequences]
        drafts = self.inner.propose(sequences, counts)
        if [sequence.token_ids for sequence in sequences] != before:
            raise Objection("propose changed the token ids of a sequence")
        if len(drafts) != len(sequences):
            raise Objection(f"returned {len(drafts)} drafts for {len(sequences)} sequences")
        for sequence, count, draft in zip(sequences, counts, drafts, strict=True):
            self.ids.add(sequence.request_id)
            self.drafts.append((sequence.request_id, count, draft.token_ids))
            if len(draft) > count:
                raise Objection(f"proposed {len(draft)} tokens where at most {count} are wanted")
        return drafts

    def forget(self, request_id: str) -> None:
        self.inner.forget(request_id)


class Objection(BaseException):
    """Raised for a broken law in a call of the proposer. It is no Exception, since the runner would catch that and end
    the request.
    """


def _run(
    speculate: Speculation, scenario: DraftScenario, runner: Runner | None = None
) -> tuple[dict[str, tuple[int, ...]], RecordedProposer, list[Event]]:
    """Run a scenario with a proposer; return tokens by request, the proposer, and the events."""
    events: list[Event] = []
    runner = runner or scenario.runner(speculate)
    assert runner.core.speculator is not None
    recorded = RecordedProposer(runner.core.speculator.proposer)
    runner.core.speculator.proposer = recorded
    try:
        runner.set_listener(events.append)
        for _ in runner.stream(scenario.requests()):
            pass
    except Objection as objection:
        raise LawBroken(f"{objection}, on {scenario}") from None
    finally:
        runner.core.speculator.proposer = recorded.inner
    return _tokens(events, scenario), recorded, events


def _tokens(events: list[Event], scenario: DraftScenario) -> dict[str, tuple[int, ...]]:
    ends = [event for event in events if isinstance(event, Finished)]
    for end in ends:
        if end.reason != "length":
            raise LawBroken(f"{end.request_id} ended: {end.error or end.reason}, on {scenario}")
    return {end.request_id: end.token_ids for end in ends}


@functools.cache
def _target(model: str) -> LoadedModel:
    return LoadedModel.load(EngineConfig.build(model, dtype="float64", backend="eager"), lambda line: None)


@functools.lru_cache(maxsize=256)
def _plain(scenario: DraftScenario) -> dict[str, tuple[int, ...]]:
    """Return the tokens of each request alone, without drafts."""
    events: list[Event] = []
    for request in scenario.requests():
        runner = scenario.runner(NoSpeculation(), events.append)
        for _ in runner.stream([request]):
            pass
    return _tokens(events, scenario)


def _same_text(speculate: Speculation, scenario: DraftScenario) -> None:
    found, _, _ = _run(speculate, scenario)
    wanted = _plain(scenario)
    for name, tokens in found.items():
        if tokens != wanted[name]:
            at = next(i for i, (a, b) in enumerate(zip(tokens, wanted[name], strict=True)) if a != b)
            raise LawBroken(f"{name} has another token {at} than without drafts, on {scenario}")


def _within_counts(speculate: Speculation, scenario: DraftScenario) -> None:
    vocab = _target(scenario.model).transformer.spec.vocab_size
    for _, count, tokens in _run(speculate, scenario)[1].drafts:
        if len(tokens) > count or any(not 0 <= token < vocab for token in tokens):
            raise LawBroken(f"proposed {tokens} where at most {count} tokens are wanted, on {scenario}")


def _forgets(speculate: Speculation, scenario: DraftScenario) -> None:
    """Check that no id of an ended request is reachable from the proposer, and that another text may reuse the id."""
    runner = scenario.runner(speculate)
    _, recorded, _ = _run(speculate, scenario, runner)
    assert runner.core.speculator is not None
    runner.core.speculator.clear()
    left = recorded.ids & set(_strings(recorded.inner))
    if left:
        raise LawBroken(f"still keeps {', '.join(sorted(left))} when everything has ended, on {scenario}")
    others = tuple((text + 1) % len(TEXTS) for text in scenario.texts)
    other = replace(scenario, texts=others, output_tokens=6)
    if _run(speculate, other, runner)[0] != _plain(other):
        raise LawBroken(f"gives another text under an id that was used before, on {other}")


def _repeats(speculate: Speculation, scenario: DraftScenario) -> None:
    first, again = (_run(speculate, scenario)[1].drafts for _ in range(2))
    if first != again:
        raise LawBroken(f"proposes something else in a second run, which no replay could follow, on {scenario}")


def _proposes(speculate: Speculation, scenario: DraftScenario) -> None:
    if not any(isinstance(event, Verified) for event in _run(speculate, scenario)[2]):
        raise LawBroken(f"proposes nothing, on {scenario}")


def _samples(speculate: Speculation, model: str, text: int) -> None:
    """Count the outcomes of a few sampled tokens, and compare them with the model's probabilities by a chi-squared
    test.
    """
    loaded = _target(model)
    assert loaded.tokenizer is not None
    prompt = tuple(loaded.tokenizer.encode(TEXTS[text]))
    config = EngineConfig.build(
        model, dtype="float64", backend="eager", page_size=PAGE_SIZE, pages=2048, max_num_seqs=64,
        max_num_batched_tokens=512, speculate=speculate,
    )  # fmt: skip
    way = SamplingParameters(
        max_tokens=SAMPLED_TOKENS + 2, temperature=1.5, top_k=TOP_K, n=NUM_SAMPLES, ignore_eos=True, seed=text
    )
    ends = [e for e in Runner(config, loaded).stream([Request("r", prompt, way)]) if isinstance(e, Finished)]
    if wrong := next((end.error for end in ends if end.reason != "length"), ""):
        raise LawBroken(f"a sample ended: {wrong}")
    counts = Counter(end.token_ids[:SAMPLED_TOKENS] for end in ends)
    expected = dict(_outcomes(loaded.transformer, prompt, way.temperature))
    if strange := next((outcome for outcome in counts if outcome not in expected), None):
        raise LawBroken(f"sampled {strange}, which the target's distribution has not, on text {text}")
    squares = sum((counts[o] - NUM_SAMPLES * p) ** 2 / (NUM_SAMPLES * p) for o, p in expected.items())
    if squares > (bound := _chi_squared_bound(len(expected) - 1)):
        raise LawBroken(
            f"sampled tokens are not distributed as the target's: chi-squared {squares:.0f} of {NUM_SAMPLES} samples, "
            f"{bound:.0f} is allowed, on text {text}; tokens of a draft with probabilities must be drawn from these"
        )


def _outcomes(
    target: Transformer, prompt: tuple[int, ...], temperature: float
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield every outcome of SAMPLED_TOKENS tokens, with its probability under the target."""

    def walk(found: tuple[int, ...], chance: float) -> Iterator[tuple[tuple[int, ...], float]]:
        if len(found) == SAMPLED_TOKENS:
            yield found, chance
            return
        best, ids = (target.logits((*prompt, *found))[-1] / temperature).topk(TOP_K)
        for token, share in zip(ids.tolist(), best.double().softmax(-1).tolist(), strict=True):
            yield from walk((*found, token), chance * share)

    yield from walk((), 1.0)


def _chi_squared_bound(freedom: int) -> float:
    """Return a bound that chi-squared exceeds with a probability of at most SIGNIFICANCE (Laurent and Massart, 2000),
    with a margin for rare outcomes.
    """
    x = -math.log(SIGNIFICANCE)
    return 1.5 * (freedom + 2 * math.sqrt(freedom * x) + 2 * x)


def _strings(value: object) -> Iterator[str]:
    """Yield every string that is reachable through a proposer's containers and objects."""
    seen: set[int] = set()
    left = [value]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, torch.Tensor | torch.nn.Module | type):
            continue
        seen.add(id(each))
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            keys = list(each)
            if not (keys and all(isinstance(key, int | tuple) for key in keys[:8])):
                left += keys
            left += [inner for inner in list(each.values()) if not isinstance(inner, int | float)]
        elif isinstance(each, list | tuple | set | frozenset) or type(each).__name__ == "deque":
            left += [inner for inner in each if not isinstance(inner, int | float)]  # type: ignore[attr-defined] (a deque)
        elif hasattr(each, "__dict__") and not isinstance(each, functools.partial) and not callable(each):
            left += list(vars(each).values())


ScenarioCheck = Callable[[Speculation, DraftScenario], None]
LAWS: dict[str, tuple[ScenarioCheck, st.SearchStrategy[DraftScenario]]] = {
    "greedy text is the text without drafts, token for token": (_same_text, PLENTY_OF_PAGES),
    "greedy text is the same when pages run out and sequences are preempted": (_same_text, SCARCE_PAGES),
    "proposes at most as many tokens as requested, all of them in the vocabulary": (_within_counts, PLENTY_OF_PAGES),
    "the same run has the same drafts": (_repeats, PLENTY_OF_PAGES),
    "forgets a request that has ended": (_forgets, PLENTY_OF_PAGES),
}
SAMPLING_LAW = "sampled tokens are distributed as without drafts"
PROPOSES_LAW = "proposes something"


def check_proposer(speculate: Any, examples: int = 6, model: str = "demo-draft") -> ConformityReport:
    """Try a proposer on small engines, and report for each law whether it holds.

    Args:
        speculate: a value of the setting `speculate`: a path (`mine.py:Proposer`), a mapping with its path, arguments
            and `num_speculative_tokens`, or a built-in one.
        examples: number of scenarios tried for each law, the same in every call.
        model: name of the target model (default: the smallest demo model).

    Raises:
        WorkbenchError: if it cannot be found or built.
    """
    setting = parse_speculation(speculate)
    name = getattr(setting, "path", setting.kind)
    everything = DraftScenario(tuple(range(len(TEXTS))), 24, 64, model)
    everything.runner(setting)  # raises a clear error if it cannot be built

    def tried(check: ScenarioCheck) -> Callable[[DraftScenario], None]:
        return lambda scenario: check(setting, replace(scenario, model=model))

    laws = [check_law(law, tried(check), examples, drawn) for law, (check, drawn) in LAWS.items()]
    laws.append(check_law(SAMPLING_LAW, functools.partial(_samples, setting, model), 1, st.just(0)))
    laws.append(check_law(PROPOSES_LAW, tried(_proposes), 1, st.just(everything)))
    return ConformityReport(f"proposer {name}", tuple(laws))
