"""Run known texts through a runner as if it generated them ("teacher forcing"), and score each token.

The run is like serving: chunked prefill and decode, pages, cache format, backend. The differences: the next token is
taken from the text, and logits are computed at every scored position. Next-token distributions of two models are
compared token by token over the same texts.
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from workbench.engine.runner import Runner, generate
from workbench.executors.step_runner import Forward, StepHook
from workbench.measure.rounds import check_full_length, greedy_sampling
from workbench.request import Request, Sequence
from workbench.runs.metrics import percentile
from workbench.sampling.combiners import OtherLogits
from workbench.sampling.sampler import Sampler
from workbench.sampling.samplers import SampledToken
from workbench.sampling.verify import Draft
from workbench.scheduler.plan import StepPlan

LogitsCallback = Callable[[int, int, Tensor], None]
MAX_ROWS_PER_COMPARISON = 512  # rows of logits compared at once: the default maximum of a step


@dataclass(frozen=True)
class ForcedText:
    """A tokenized text to score.

    The first `num_prompt_tokens` tokens are the prompt, the others are decoded. Tokens from index `first_scored` on are
    scored: token i by the logits at position i - 1. `rivals` holds wrong choices for some scored tokens, by index."""

    ids: tuple[int, ...]
    first_scored: int
    num_prompt_tokens: int
    rivals: abc.Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.first_scored < len(self.ids) or not 1 <= self.num_prompt_tokens < len(self.ids):
            raise ValueError(
                f"{len(self.ids)} tokens: first_scored {self.first_scored}, num_prompt_tokens {self.num_prompt_tokens} "
                "must be from 1 to below that"
            )


def score_texts(runner: Runner, texts: abc.Sequence[ForcedText], on_logits: LogitsCallback) -> None:
    """Run all texts with teacher forcing and pass the logits of every scored position to `on_logits`.

    Args:
        runner: The runner to use; its sampler and proposer are restored at the end.
        texts: Texts to score.
        on_logits: Receives (index of the text, index of the first scored token, logits [token, vocab]) as they are
            computed, in order within a text.

    Raises:
        WorkbenchError: If a text does not run to its end.
    """
    requests = [
        Request(
            str(index),
            text.ids[: text.num_prompt_tokens],
            greedy_sampling(len(text.ids) - text.num_prompt_tokens),
        )
        for index, text in enumerate(texts)
    ]
    with _replaced(runner, _Scoring(texts, on_logits), _ForcedSampler(texts)):
        ends = generate(runner, requests)
    for name, end in ends.items():
        check_full_length(end, f"text {name} of {len(texts[int(name)].ids)} tokens")


def score_tokens(runner: Runner, texts: abc.Sequence[ForcedText]) -> list[list[tuple[float, bool]]]:
    """Return for every scored token of each text its log-probability, and whether it is the most likely token."""
    scores: list[list[tuple[float, bool]]] = [[] for _ in texts]

    def note(index: int, first: int, logits: Tensor) -> None:
        ids = torch.tensor(texts[index].ids[first : first + len(logits)])
        logprobs = logits.double().log_softmax(-1).cpu()
        likely = (logprobs.argmax(-1) == ids).tolist()
        scores[index] += zip(logprobs.gather(-1, ids[:, None])[:, 0].tolist(), likely, strict=True)

    score_texts(runner, texts, note)
    return scores


class _Scoring:
    """A hook of a `StepRunner` that requests the logits of every scored position."""

    def __init__(self, texts: abc.Sequence[ForcedText], on_logits: LogitsCallback):
        self.texts, self.note = texts, on_logits
        # next positions to score; recomputed positions are not scored twice
        self.next = [text.first_scored - 1 for text in texts]

    def __call__(self, forward: Forward, plan: StepPlan) -> Tensor:
        indices = [int(span.sequence.request_id) for span in plan.spans]
        first = [max(span.start, self.next[index]) for span, index in zip(plan.spans, indices, strict=True)]
        wanted = [max(0, span.end - place) for span, place in zip(plan.spans, first, strict=True)]
        asked = [max(rows, int(span.needs_sample)) for span, rows in zip(plan.spans, wanted, strict=True)]
        spans = tuple(span._replace(requested_logits=rows) for span, rows in zip(plan.spans, asked, strict=True))
        logits = forward(replace(plan, spans=spans))
        sampled = []
        for index, span, rows, part in zip(indices, spans, wanted, logits.split(asked), strict=True):
            if rows:
                self.note(index, span.end - rows + 1, part[len(part) - rows :])
                self.next[index] = span.end
            if span.needs_sample:
                sampled.append(part[-1])
        return torch.stack(sampled) if sampled else logits[:0]


class _ForcedSampler(Sampler):
    """A sampler that returns the next token of the text."""

    def __init__(self, texts: abc.Sequence[ForcedText]):
        super().__init__()
        self.texts = texts

    def verify(
        self,
        logits: Tensor,
        sequences: list[Sequence],
        drafts: abc.Sequence[Draft],
        others: abc.Mapping[str, OtherLogits] = MappingProxyType({}),
    ) -> list[list[SampledToken]]:
        return [[SampledToken(self.texts[int(served.request_id)].ids[len(served.token_ids)])] for served in sequences]


@contextmanager
def _replaced(runner: Runner, hook: StepHook, sampler: Any) -> Iterator[None]:
    """Add a hook around the runner's steps, replace its sampler and disable drafting; undo all of them at the end."""
    core, own_speculator, own_sampler = runner.core, runner.core.speculator, runner.core.decoder.sampler
    core.set_speculator(None)
    core.executor.hooks.append(hook)
    core.decoder.sampler = sampler
    try:
        yield
    finally:
        core.executor.hooks.remove(hook)
        core.decoder.sampler = own_sampler
        core.set_speculator(own_speculator)


@dataclass
class ReferenceLogits:
    """Logits of one runner at every scored position: a list of [token, vocab] tensors for each text. `first_text` is
    the index of the first text in the divergences."""

    texts: abc.Sequence[ForcedText]
    rows: list[list[Tensor]] = field(default_factory=list, repr=False)
    first_text: int = 0

    @classmethod
    def compute(cls, runner: Runner, texts: abc.Sequence[ForcedText], first_text: int = 0) -> ReferenceLogits:
        found = cls(texts, [[] for _ in texts], first_text)
        score_texts(runner, texts, lambda index, _, logits: found.rows[index].append(logits.cpu().clone()))
        return found

    def logits_from(self, index: int, first: int, count: int) -> Tensor:
        """Return the logits [token, vocab] of `count` tokens of a text, starting at token `first`."""
        if len(self.rows[index]) > 1:
            self.rows[index] = [torch.cat(self.rows[index])]
        start = first - self.texts[index].first_scored
        return self.rows[index][0][start : start + count]


@dataclass
class TokenDivergences:
    """One column for each metric, one row for each scored token.

    `nats` is the token's negative log-probability, `kl` is KL(reference || model) in nats, `same_top` is true if both
    have the same most likely token, `chosen` if the token is likelier than its rivals (None without rivals)."""

    text: list[int] = field(default_factory=list)
    token: list[int] = field(default_factory=list)
    nats: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same_top: list[bool] = field(default_factory=list)
    chosen: list[bool | None] = field(default_factory=list)

    def extend(self, other: TokenDivergences) -> None:
        for name, column in vars(other).items():
            getattr(self, name).extend(column)

    def summary(self, num_bytes: int) -> dict[str, float]:
        """Return means and percentiles over the tokens. `num_bytes` is the size of their text in bytes."""
        answers = [each for each in self.chosen if each is not None]
        choices = {"choices_right": sum(answers) / len(answers), "choices": len(answers)} if answers else {}
        return choices | {
            "bits_per_byte": math.fsum(self.nats) / math.log(2) / num_bytes,
            "kl_mean": math.fsum(self.kl) / len(self.kl),
            "kl_p99": percentile(self.kl, 99) or 0.0,
            "kl_max": max(self.kl),
            "same_top": sum(self.same_top) / len(self.same_top),
            "scored_tokens": len(self.kl),
        }


def self_divergence(reference: ReferenceLogits) -> TokenDivergences:
    """Return the token divergences of a reference from itself (KL 0), without running it again."""
    places = TokenDivergences()
    for index, text in enumerate(reference.texts):
        for first in range(text.first_scored, len(text.ids), MAX_ROWS_PER_COMPARISON):
            ids = torch.tensor(text.ids[first : first + MAX_ROWS_PER_COMPARISON])
            rows = reference.logits_from(index, first, len(ids))
            append_divergences(places, reference.first_text + index, first, rows, rows, ids, text.rivals)
    return places


def measure_divergence(runner: Runner, reference: ReferenceLogits) -> TokenDivergences:
    """Run the reference's texts through `runner` and compare the logits at every scored position, in the order of the
    texts. Holds the logits of one step in memory at a time.

    Example: `workbench.measure_divergence(runner, reference)`
    """
    places = TokenDivergences()

    def note(index: int, first: int, logits: Tensor) -> None:
        text, exact = reference.texts[index], reference.logits_from(index, first, len(logits))
        ids = torch.tensor(text.ids[first : first + len(logits)])
        append_divergences(places, reference.first_text + index, first, exact, logits.cpu(), ids, text.rivals)

    score_texts(runner, reference.texts, note)
    order = sorted(range(len(places.text)), key=lambda row: (places.text[row], places.token[row]))  # steps mix texts
    return TokenDivergences(*([column[row] for row in order] for column in vars(places).values()))


def append_divergences(
    divergences: TokenDivergences,
    text: int,
    first: int,
    reference_logits: Tensor,
    logits: Tensor,
    ids: Tensor,
    rivals: abc.Mapping[int, tuple[int, ...]] = MappingProxyType({}),
) -> None:
    """Append one row per scored token to `divergences`, from the logits [token, vocab] of both models and the tokens
    that follow, with wrong choices for some of them; computed in float64."""
    p, q = reference_logits.double().log_softmax(-1), logits.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0.0)
    divergences.text += [text] * len(ids)
    divergences.token += range(first, first + len(ids))
    divergences.nats += (-q.gather(-1, ids[:, None])[:, 0]).tolist()
    divergences.kl += kl.tolist()
    divergences.same_top += (p.argmax(-1) == q.argmax(-1)).tolist()
    for row, right in enumerate(ids.tolist()):
        wrong = rivals.get(first + row)
        divergences.chosen.append(None if wrong is None else bool(q[row, right] > q[row, list(wrong)].max()))
