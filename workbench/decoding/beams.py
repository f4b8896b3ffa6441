"""Run beam search: every beam is a sequence that shares pages with the other beams.

    beams   | prompt ......... | a b c |      a step computes all of them; `advance` chooses the continuations;
            | (shared pages)   | a b d |      a beam that continues another forks it: the last partial page is
            |                  | a e f |      copied on write, a beam without continuation frees its pages

The semantics are those of Hugging Face's `generate(num_beams=..., do_sample=False)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.decoding.method import Advance, Fork, NextRow, TimedToken
from workbench.request import SamplingParameters, Sequence
from workbench.sampling.samplers import SampledToken, describe_bad_logits


@dataclass(frozen=True)
class BeamHypothesis:
    """A finished text of a beam search: its tokens (end token included), their log-probabilities, and its score: the
    sum of log-probabilities / length ** length_penalty.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float
    text: str = ""


@dataclass(frozen=True)
class Beam:
    """An unfinished text of a beam search: its sequence and log-probabilities."""

    sequence: Sequence
    logprob: float
    logprobs: tuple[float, ...] = ()


class Beams:
    """One beam search: its unfinished texts (beams) and its finished texts."""

    hidden: tuple[Sequence, ...] = ()
    layers: tuple[int, ...] = ()

    def __init__(
        self, sampling: SamplingParameters, sequences: Iterable[Sequence], end_token_ids: set[int], max_tokens: int
    ):
        self.sequences = list(sequences)
        self.num_beams, self.num_returned = sampling.beams, sampling.n
        self.end_token_ids, self.max_tokens = end_token_ids, max_tokens
        self.length_penalty, self.early_stopping = sampling.length_penalty, sampling.early_stopping
        # At first all texts are equal, so only one is continued.
        self.beams = [Beam(sequence, 0.0 if number == 0 else -torch.inf) for number, sequence in enumerate(sequences)]
        self.hypotheses: list[BeamHypothesis] = []
        self.token_times: list[tuple[float, int]] = []  # (time, step) of the tokens at each output position
        self._candidates: dict[str, list[tuple[int, float]]] = {}  # candidates of each beam

    @property
    def is_ready(self) -> bool:
        return len(self._candidates) == self.num_beams and all(beam.sequence.num_new_tokens == 0 for beam in self.beams)

    def add(self, sequence: Sequence, row: NextRow) -> str:
        if wrong := bad_logits(row.logits):
            return wrong
        logprobs = row.logits.double().log_softmax(-1)
        count = min(len(logprobs), (1 + max(1, len(self.end_token_ids))) * self.num_beams)
        least = logprobs.topk(count).values[-1]
        ids = (logprobs >= least).nonzero()[:, 0]
        self._candidates[sequence.request_id] = list(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
        return ""

    def advance(self, step: int, now: float, fork: Fork) -> list[Advance]:
        """Continue the best texts, one per beam, or end the search and return its results."""
        self.token_times.append((now, step))
        going = self._continuations(len(self.token_times))
        self._candidates = {}
        if not going or not self._may_improve(going[0][0].logprob, len(self.token_times)):
            return self._results()
        while len(going) < self.num_beams:  # fewer tokens than beams: fill up
            beam, token = going[0]
            going.append((replace(beam, logprob=-torch.inf), token))
        sequences = fork(self.sequences, [(beam.sequence, token) for beam, token in going])
        self.beams = [replace(beam, sequence=each) for each, (beam, _) in zip(sequences, going, strict=True)]
        return []

    def _continuations(self, length: int) -> list[tuple[Beam, int]]:
        """Return the best (beam, next token) pairs, best first, and store the texts that end."""
        candidates = [
            (-(beam.logprob + logprob), number, token, logprob)
            for number, beam in enumerate(self.beams)
            for token, logprob in self._candidates[beam.sequence.request_id]
        ]
        candidates = sorted(candidates)[: (1 + max(1, len(self.end_token_ids))) * self.num_beams]
        going: list[tuple[Beam, int]] = []
        for rank, (cost, number, token, logprob) in enumerate(candidates):
            beam = self.beams[number]
            longer = Beam(beam.sequence, -cost, (*beam.logprobs, logprob))
            if token not in self.end_token_ids and length < self.max_tokens:
                going.append((longer, token))
            elif rank < self.num_beams and cost < torch.inf:
                self._finish(longer, token, length)
        return going[: self.num_beams]

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

    def _results(self) -> list[Advance]:
        """Return the output of each sequence, best text first."""
        return [self._result(rank, sequence) for rank, sequence in enumerate(self.sequences)]

    def _result(self, rank: int, sequence: Sequence) -> Advance:
        texts = self.hypotheses
        if rank >= len(texts):
            why = f"not chosen: the search found {len(texts)} texts"
            return Advance(sequence, (), is_whole=True, not_chosen=why)
        text, why = texts[rank], ""
        if rank >= self.num_returned:
            why = not_chosen_message(rank, len(self.sequences), text.score, texts[self.num_returned - 1].score)
        tokens = [
            TimedToken(SampledToken(token, logprob), *moment)
            for token, logprob, moment in zip(text.token_ids, text.logprobs, self.token_times, strict=False)
        ]
        return Advance(sequence, tokens, True, text.score, why)


def bad_logits(logits: Tensor) -> str:
    """Describe the fault of a row of logits [vocab]; return an empty string for a valid one."""
    largest = float(logits.max())
    return "" if abs(largest) < torch.inf else f"the model's logits {describe_bad_logits(largest)}"


def not_chosen_message(rank: int, samples: int, score: float, last: float) -> str:
    return f"not chosen: number {rank + 1} of {samples}, with a score of {score:.3f}; the last chosen has {last:.3f}"
