"""Divergence between the next-token distributions of two models, token by token over the same texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.engine.runner import Runner
from workbench.study.forced import ForcedText, score_texts
from workbench.study.metrics import percentile

MAX_ROWS_PER_COMPARISON = 512  # rows compared at once: the default maximum of a step


@dataclass
class ReferenceLogits:
    """Logits of one runner at every scored position: a list of [token, vocab] tensors for each text."""

    texts: Sequence[ForcedText]
    rows: list[list[Tensor]] = field(default_factory=list, repr=False)

    @classmethod
    def compute(cls, runner: Runner, texts: Sequence[ForcedText]) -> ReferenceLogits:
        found = cls(texts, [[] for _ in texts])
        score_texts(runner, texts, lambda index, _, logits: found.rows[index].append(logits.cpu().clone()))
        return found

    def logits_from(self, index: int, first: int, count: int) -> Tensor:
        """Return the logits of `count` tokens of a text from token `first` on: [token, vocab]."""
        if len(self.rows[index]) > 1:
            self.rows[index] = [torch.cat(self.rows[index])]
        start = first - self.texts[index].first_scored
        return self.rows[index][0][start : start + count]


@dataclass
class TokenDivergences:
    """One column a metric, one row a scored token.

    `nats` is the token's negative log-probability, `kl` is KL(reference || model) in nats, `same_top` tells whether
    both have the same most likely token."""

    text: list[int] = field(default_factory=list)
    token: list[int] = field(default_factory=list)
    nats: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same_top: list[bool] = field(default_factory=list)

    def summary(self, num_bytes: int) -> dict[str, float]:
        """Return means and percentiles over the tokens. `num_bytes` is the size of their text in bytes."""
        return {
            "bits_per_byte": math.fsum(self.nats) / math.log(2) / num_bytes,
            "kl_mean": math.fsum(self.kl) / len(self.kl),
            "kl_p99": percentile(self.kl, 99) or 0.0,
            "kl_max": max(self.kl),
            "same_top": sum(self.same_top) / len(self.same_top),
            "scored_tokens": len(self.kl),
        }


def self_divergence(reference: ReferenceLogits) -> TokenDivergences:
    """Return the divergences of the reference from itself, without running it again."""
    places = TokenDivergences()
    for index, text in enumerate(reference.texts):
        for first in range(text.first_scored, len(text.ids), MAX_ROWS_PER_COMPARISON):
            ids = torch.tensor(text.ids[first : first + MAX_ROWS_PER_COMPARISON])
            rows = reference.logits_from(index, first, len(ids))
            append_divergences(places, index, first, rows, rows, ids)
    return places


def measure_divergence(runner: Runner, reference: ReferenceLogits) -> TokenDivergences:
    """Run the reference's texts through `runner` and compare the logits at every scored position. Memory: the logits of
    one step."""
    places = TokenDivergences()

    def note(index: int, first: int, logits: Tensor) -> None:
        ids = torch.tensor(reference.texts[index].ids[first : first + len(logits)])
        append_divergences(places, index, first, reference.logits_from(index, first, len(logits)), logits.cpu(), ids)

    score_texts(runner, reference.texts, note)
    return places


def append_divergences(divergences: TokenDivergences, text: int, first: int, reference_logits: Tensor, logits: Tensor, ids: Tensor) -> None:
    """Append rows for the logits [token, vocab] of both models and the tokens that followed, computed in float64."""
    p, q = reference_logits.double().log_softmax(-1), logits.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0.0)
    divergences.text += [text] * len(ids)
    divergences.token += range(first, first + len(ids))
    divergences.nats += (-q.gather(-1, ids[:, None])[:, 0]).tolist()
    divergences.kl += kl.tolist()
    divergences.same_top += (p.argmax(-1) == q.argmax(-1)).tolist()
