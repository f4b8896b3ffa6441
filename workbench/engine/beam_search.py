"""Beam search over a runner's sequences: every beam is one, and shares pages with the others.

    beams   | prompt ......... | a b c |      a step computes all of them; `advance` chooses the continuations;
            | (shared pages)   | a b d |      a beam that continues another forks it: the last partial page is
            |                  | a e f |      copied on write, a beam without continuation frees its pages

The semantics are those of Hugging Face's `generate(num_beams=..., do_sample=False)`. `BeamSearches` tracks the searches
of a runner and the result of each beam.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from workbench.engine import inputs as intake
from workbench.engine.outputs import not_chosen_message
from workbench.errors import WorkbenchError
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import FinishReason, Request, SamplingParameters, Sequence
from workbench.sampling.samplers import describe_bad_logits
from workbench.scheduler.plan import StepPlan
from workbench.trace.events import Decoded, Event, Finished

EarlyStopping = bool | Literal["never"]


class EventStream(Protocol):
    """The part of a runner that a search needs: its tokenizer, and events of the requests given to it."""

    tokenizer: Tokenizer | None

    def stream(self, requests: list[Request]) -> Iterator[Event]: ...


@dataclass(frozen=True)
class BeamHypothesis:
    """A finished text: its tokens (end token included), their log-probabilities, and the sum / length **
    length_penalty."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float
    text: str = ""


def beam_search(
    runner: EventStream,
    prompt: str | Iterable[int],
    num_beams: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    *,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    request_id: str = "beams",
) -> list[BeamHypothesis]:
    """Return the best continuations of `prompt` by beam search, best first; other requests of the runner go on
    meanwhile.

    The result equals that of a request whose sampling has `beams` and `n`.

        workbench.beam_search(runner, "def fib(n):", num_beams=4, max_tokens=16)[0].text

    Args:
        runner: the runner to use.
        prompt: text or token ids.
        num_beams: number of beams, and of texts returned.
        max_tokens: the most tokens of a text.
        length_penalty: a text's score is its log-probability / tokens ** length_penalty.
        early_stopping: True stops with as many finished texts as beams. False stops when no beam of the present length
            would beat the worst of them, "never" when none could at any length.

    Raises:
        WorkbenchError: if it cannot run.
    """
    sampling = intake.parse_sampling({
        "beams": num_beams, "n": num_beams, "max_tokens": max_tokens, "length_penalty": length_penalty,
        "early_stopping": early_stopping, "stop_token_ids": stop_token_ids, "ignore_eos": ignore_eos,
    })  # fmt: skip
    if isinstance(prompt, str):
        request = intake.make_request(prompt, runner.tokenizer, sampling, request_id)
    else:
        request = Request(request_id, tuple(prompt), sampling)
    logprobs: dict[int, list[float]] = {}
    found: dict[int, BeamHypothesis] = {}
    for event in runner.stream([request]):
        if isinstance(event, Decoded) and event.logprob is not None:
            logprobs.setdefault(event.sample, []).append(event.logprob)
        elif isinstance(event, Finished):
            if event.reason == FinishReason.NOT_CHOSEN:
                continue  # a vocabulary smaller than the beams
            if event.score is None:
                raise WorkbenchError(event.error or f"beam search: {event.reason}")
            mine = tuple(logprobs.get(event.sample, ()))
            found[event.sample] = BeamHypothesis(event.token_ids, mine, event.score, event.output_text)
    return [found[number] for number in sorted(found)]


@dataclass(frozen=True)
class Beam:
    """A text in progress with its log-probabilities."""

    sequence: Sequence
    logprob: float
    logprobs: tuple[float, ...] = ()


class BeamSearch:
    """One beam search: its beams and finished texts."""

    def __init__(
        self, sampling: SamplingParameters, sequences: Iterable[Sequence], end_token_ids: set[int], max_tokens: int
    ):
        self.sequences = list(sequences)
        self.num_beams, self.num_returned, self.end_token_ids, self.max_tokens = (
            sampling.beams,
            sampling.n,
            end_token_ids,
            max_tokens,
        )
        self.length_penalty, self.early_stopping = sampling.length_penalty, sampling.early_stopping
        # At first all texts are the same: only one of them may go on.
        self.beams = [Beam(sequence, 0.0 if number == 0 else -torch.inf) for number, sequence in enumerate(sequences)]
        self.hypotheses: list[BeamHypothesis] = []
        self.token_times: list[tuple[float, int]] = []  # by output position: time and step of its tokens
        self._rows: dict[str, list[tuple[int, float]]] = {}

    @property
    def ready(self) -> bool:
        """Return whether every beam has computed what it knows: they advance together."""
        return len(self._rows) == self.num_beams and all(
            beam.sequence.num_uncomputed_tokens == 0 for beam in self.beams
        )

    def add_logits(self, sequence: Sequence, logits: Tensor, state: Tensor | None = None) -> str:
        """Add the model's `logits` [vocab] after the text of `sequence`; return what is wrong with them, or an empty
        string. `state` [hidden] is that of its last token after the last layer, for searches that look at it."""
        largest = float(logits.max())
        if not abs(largest) < torch.inf:
            return f"the model's logits {describe_bad_logits(largest)}"
        logprobs = logits.double().log_softmax(-1)
        count = min(len(logprobs), (1 + max(1, len(self.end_token_ids))) * self.num_beams)
        least = logprobs.topk(count).values[-1]
        ids = (logprobs >= least).nonzero()[:, 0]
        self._rows[sequence.request_id] = list(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
        return ""

    def advance(self, now: float, step: int) -> list[tuple[Sequence, int]] | None:
        """Choose (sequence, token) for as many continuations as there are beams; None when the search is over."""
        self.token_times.append((now, step))
        length = len(self.token_times)
        candidates = [
            (-(beam.logprob + logprob), number, token, logprob)
            for number, beam in enumerate(self.beams)
            for token, logprob in self._rows[beam.sequence.request_id]
        ]
        candidates = sorted(candidates)[: (1 + max(1, len(self.end_token_ids))) * self.num_beams]
        self._rows = {}
        continuations: list[tuple[Beam, int]] = []
        for rank, (cost, number, token, logprob) in enumerate(candidates):
            beam = self.beams[number]
            longer = Beam(beam.sequence, -cost, (*beam.logprobs, logprob))
            if token not in self.end_token_ids and length < self.max_tokens:
                continuations.append((longer, token))
            elif rank < self.num_beams and cost < torch.inf:
                self._finish(longer, token, length)
        continuations = continuations[: self.num_beams]
        if not continuations or not self._may_improve(continuations[0][0].logprob, length):
            return None
        while (
            len(continuations) < self.num_beams
        ):  # a vocabulary smaller than the beams: texts that cannot be chosen fill up
            beam, token = continuations[0]
            continuations.append((Beam(beam.sequence, -torch.inf, beam.logprobs), token))
        self.beams = [beam for beam, _ in continuations]
        return [(beam.sequence, token) for beam, token in continuations]

    def reassign(self, sequences: list[Sequence]) -> None:
        """Assign the sequences that hold the texts chosen by `advance`, in its order."""
        beams = zip(sequences, self.beams, strict=True)
        self.beams = [Beam(sequence, beam.logprob, beam.logprobs) for sequence, beam in beams]

    def _finish(self, beam: Beam, token: int, length: int) -> None:
        output = (*beam.sequence.output_ids, token)
        self.hypotheses.append(BeamHypothesis(output, beam.logprobs, beam.logprob / length**self.length_penalty))
        self.hypotheses = sorted(self.hypotheses, key=lambda each: -each.score)[: self.num_beams]

    def _may_improve(self, best: float, length: int) -> bool:
        """Return whether the best beam could still beat the worst finished text."""
        if len(self.hypotheses) < self.num_beams:
            return True
        if self.early_stopping is True:
            return False
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_tokens
        return best / length**self.length_penalty > self.hypotheses[-1].score


class BeamResult(NamedTuple):
    """The result of one beam: its text, and why that is not returned (empty if it is)."""

    sequence: Sequence
    hypothesis: BeamHypothesis | None
    not_chosen_reason: str = ""


class BeamSearches(dict[str, BeamSearch]):
    """Beam searches by the id of each of their beams; every beam is a sequence of its own to the scheduler."""

    def add(self, search: BeamSearch) -> None:
        """Start a search."""
        self.update({beam.request_id: search for beam in search.sequences})

    def beams_of(self, sequence: Sequence) -> list[Sequence]:
        """Return the beams of the search of `sequence`; the sequence itself without one."""
        search = self.get(sequence.request_id)
        return [sequence] if search is None else search.sequences

    def ready(self, plan: StepPlan) -> list[BeamSearch]:
        """Return searches whose beams all have logits after `plan`."""
        searches = (self.get(span.sequence.request_id) for span in plan.spans)
        met = {id(search): search for search in searches if search is not None}
        return [search for search in met.values() if search.ready]


def beam_results(search: BeamSearch) -> list[BeamResult]:
    """Return the result of each beam of a finished search, best text first."""
    return [_beam_result(search, rank, sequence) for rank, sequence in enumerate(search.sequences)]


def _beam_result(search: BeamSearch, rank: int, sequence: Sequence) -> BeamResult:
    found, returned = search.hypotheses, search.num_returned
    if rank >= len(found):
        return BeamResult(sequence, None, f"not chosen: the search found {len(found)} texts")
    if rank < returned:
        return BeamResult(sequence, found[rank])
    return BeamResult(
        sequence,
        found[rank],
        not_chosen_message(rank, len(search.sequences), found[rank].score, found[returned - 1].score),
    )
