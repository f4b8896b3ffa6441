"""Filter logits before a token is sampled. Filters are frozen values, functions of rows and histories.

A filter takes logits `[sample, vocab]` (float32) and one `History` per row, and returns new logits of the same shape in
which a removed token is -inf. It never changes its input. Values equal those of transformers' warpers and processors;
presence and frequency penalty are those of vLLM and OpenAI.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.request import SamplingParameters

REMOVED = -float("inf")
LARGE_VOCAB = 4096  # vocabulary size from which top-p only sorts likely tokens
SAFE_TEMPERATURE = 1e-6  # below this, a plain division may overflow
SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class History:
    """The tokens before a row's next token: the prompt's and the output's."""

    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()


class Filter(Protocol):
    def __call__(self, logits: Tensor, histories: Sequence[History], /) -> Tensor: ...


@dataclass(frozen=True)
class RepetitionPenalty:
    """Divide the positive logits of tokens in prompt or output by `penalty`; multiply negative ones by it (CTRL)."""

    penalty: float

    def __post_init__(self) -> None:
        _require(self.penalty > 0, "repetition penalty", self.penalty, "above 0")

    def __call__(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        penalised = logits.clone()
        for row, history in zip(penalised, histories, strict=True):
            seen = _index({*history.prompt_ids, *history.output_ids}, logits)
            score = row[seen]
            row[seen] = torch.where(score < 0, score * self.penalty, score / self.penalty)
        return penalised


@dataclass(frozen=True)
class FrequencyPenalty:
    """Subtract `penalty` for every occurrence of a token in the output; the prompt does not count."""

    penalty: float

    def __call__(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        penalised = logits.clone()
        for row, history in zip(penalised, histories, strict=True):
            counts = Counter(history.output_ids)
            row[_index(counts, logits)] -= self.penalty * row.new_tensor(list(counts.values()))
        return penalised


@dataclass(frozen=True)
class PresencePenalty:
    """Subtract `penalty` once from every token in the output; the prompt does not count."""

    penalty: float

    def __call__(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        penalised = logits.clone()
        for row, history in zip(penalised, histories, strict=True):
            row[_index(set(history.output_ids), logits)] -= self.penalty
        return penalised


@dataclass(frozen=True)
class LogitBias:
    """Add a bias to the logits of single tokens, given as pairs of token id and bias. A bias of -inf bans the token."""

    biases: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        for token, bias in self.biases:
            _require(token >= 0, "logit bias token id", token, "0 or more")
            _require(bias < -REMOVED, f"logit bias of token {token}", bias, "finite, or -inf to ban it")

    def __call__(self, logits: Tensor, histories: Sequence[History] = ()) -> Tensor:
        ids = [token for token, _ in self.biases]
        biased = logits.clone()
        biased[:, _index(ids, logits)] += logits.new_tensor([bias for _, bias in self.biases])
        return biased


@dataclass(frozen=True)
class Temperature:
    """Divide logits by `temperature`, which keeps their order; below 1e-6 the maximum is subtracted first."""

    temperature: float

    def __post_init__(self) -> None:
        _require(self.temperature > 0, "temperature", self.temperature, "above 0 (0 means Greedy)")

    def __call__(self, logits: Tensor, histories: Sequence[History] = ()) -> Tensor:
        if self.temperature >= SAFE_TEMPERATURE:
            return logits / self.temperature
        return (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, SMALLEST)


@dataclass(frozen=True)
class TopK:
    """Keep the `k` largest logits and all that equal the smallest of them."""

    k: int

    def __post_init__(self) -> None:
        _require(self.k >= 1, "top-k", self.k, "1 or more")

    def __call__(self, logits: Tensor, histories: Sequence[History] = ()) -> Tensor:
        least = logits.topk(min(self.k, logits.shape[-1])).values[:, -1:]
        return logits.masked_fill(logits < least, REMOVED)


@dataclass(frozen=True)
class TopP:
    """Keep the smallest set of most probable tokens with a total probability of at least `p` (Holtzman et al.,
    2020).
    """

    p: float

    def __post_init__(self) -> None:
        _require(0 < self.p <= 1, "top-p", self.p, "above 0, at most 1")

    def __call__(self, logits: Tensor, histories: Sequence[History] = ()) -> Tensor:
        if logits.shape[-1] <= LARGE_VOCAB or not logits.is_cpu or logits.dtype.itemsize < 4:
            return self._of_all(logits)
        # row by row, so that no row depends on others
        return torch.cat([logits[:0], *(self._of_likely(row)[None] for row in logits)])

    def _of_likely(self, row: Tensor) -> Tensor:
        """Sort only tokens with a probability of at least (1 - p) / vocab: all others together have less than 1 - p.
        Sorting a large vocabulary would take longer than computing its logits.
        """
        mass = row.softmax(-1).numpy()
        likely = np.flatnonzero(~(mass < (1 - self.p) / len(mass)))  # also true for NaN
        likely = likely[(-row.numpy()[likely]).argsort()]
        kept = torch.from_numpy(likely[: 1 + int((mass[likely].cumsum(dtype="f8") < self.p).sum())])
        return torch.full_like(row, REMOVED).index_copy_(0, kept, row[kept])

    def _of_all(self, logits: Tensor) -> Tensor:
        # Not stable, so ties are ordered as in transformers, which uses the same sort.
        ascending, order = logits.sort()
        removed = ascending.softmax(-1).cumsum(-1) <= 1 - self.p
        removed[:, -1] = False
        return logits.masked_fill(removed.scatter(1, order, removed), REMOVED)


@dataclass(frozen=True)
class MinP:
    """Keep tokens at least `p` times as probable as the most probable one (Nguyen et al., 2024)."""

    p: float

    def __post_init__(self) -> None:
        _require(0 <= self.p <= 1, "min-p", self.p, "from 0 to 1")

    def __call__(self, logits: Tensor, histories: Sequence[History] = ()) -> Tensor:
        probabilities = logits.softmax(-1)
        return logits.masked_fill(probabilities < self.p * probabilities.amax(-1, keepdim=True), REMOVED)


def build_filters(parameters: SamplingParameters) -> tuple[Filter, ...]:
    """Return the filters of `parameters`, in order, without those that change nothing.

    At temperature 0 the largest logit is chosen, so temperature, top-k, top-p and min-p are left out, as in
    transformers; penalties and bias stay. User-defined filters run after these and are not built here.
    """
    chain: list[Filter] = []
    if parameters.repetition_penalty != 1:
        chain.append(RepetitionPenalty(parameters.repetition_penalty))
    if parameters.frequency_penalty:
        chain.append(FrequencyPenalty(parameters.frequency_penalty))
    if parameters.presence_penalty:
        chain.append(PresencePenalty(parameters.presence_penalty))
    if parameters.logit_bias:
        chain.append(LogitBias(tuple(parameters.logit_bias.items())))
    if parameters.temperature == 0:
        return tuple(chain)
    if parameters.temperature != 1:
        chain.append(Temperature(parameters.temperature))
    if parameters.top_k:
        chain.append(TopK(parameters.top_k))
    if parameters.top_p < 1:
        chain.append(TopP(parameters.top_p) if parameters.top_p else TopK(1))
    if parameters.min_p:
        chain.append(MinP(parameters.min_p))
    return tuple(chain)


def _index(token_ids, logits: Tensor) -> Tensor:
    """Convert token ids to an index tensor; ids outside of the vocabulary would wrap around, or crash a GPU kernel."""
    ids = list(token_ids)
    vocab = logits.shape[-1]
    if ids and not 0 <= min(ids) <= max(ids) < vocab:
        wrong = next(token for token in ids if not 0 <= token < vocab)
        raise WorkbenchError(f"token id {wrong} is outside the vocabulary of {vocab} tokens")
    return torch.tensor(ids, dtype=torch.long, device=logits.device)


def _require(right: bool, name: str, value: object, allowed: str) -> None:
    if not right:
        raise WorkbenchError(f"{name} {value!r}: must be {allowed}")
