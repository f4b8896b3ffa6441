"""Sample one token from one row of filtered logits. Samplers are frozen values; state is passed.

A sampler has two methods. `start()` returns the initial state of a request. `choose(logits, uniform, state)` takes a
row `[vocab]`, one number in [0, 1) and the state, and returns the token id and the next state. The caller stores one
state per request, so no state can leak from one request into another. User-defined filters and samplers are loaded by
import path.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from workbench.custom import check_arity, load_custom, load_verbs
from workbench.errors import WorkbenchError
from workbench.request import CustomPart, FinishReason, SamplingParameters
from workbench.sampling.combiners import NamedCombiner, combiner_of
from workbench.sampling.filters import Filter


@dataclass(frozen=True)
class SampledToken:
    """The token sampled for one sequence; on failure `error` has the reason and `token_id` is -1.

    If the answer ends without another token, there is a `finish_reason` and `token_id` is -1.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # most probable first, equal ones by token id
    error: str = ""
    finish_reason: FinishReason | None = None  # if the request's constraint allows no further token


def failed_token(error: str) -> SampledToken:
    return SampledToken(-1, error=error)


def with_logprobs(token: int, scores: Tensor, filtered: Tensor, sampling: SamplingParameters) -> SampledToken:
    """Return the token with the log-probabilities that the request wants, of the model or of the filtered
    distribution.
    """
    if sampling.logprobs is None:
        return SampledToken(token)
    row = scores if sampling.logprobs_of == "model" else filtered
    logprobs = row.double().log_softmax(-1)
    return SampledToken(token, float(logprobs[token]), most_probable(logprobs, sampling.logprobs))


def most_probable(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    least = logprobs.topk(min(count, len(logprobs))).values[-1]
    ids = ((logprobs >= least) & (logprobs > -torch.inf)).nonzero()[:, 0]
    best = logprobs[ids].sort(descending=True, stable=True).indices[:count]
    return tuple(zip(ids[best].tolist(), logprobs[ids[best]].tolist(), strict=True))


def describe_bad_logits(largest: float) -> str:
    if math.isnan(largest):
        return "contain NaN"
    return "contain +inf" if largest > 0 else "leave no token: all are -inf"


def describe_failure(name: str, error: Exception) -> str:
    return str(error) if isinstance(error, WorkbenchError) else f"{name}: {type(error).__name__}: {error}"


class TokenSampler(Protocol):
    def start(self) -> Any: ...

    def choose(self, logits: Tensor, uniform: float, state: Any, /) -> tuple[int, Any]: ...


def uniform(seed: int, position: int, use: bytes = b"") -> float:
    """Return a number in [0, 1) with 53 random bits.

    It depends only on a request's seed, the token's position in the output, and the purpose of the number, so a sample
    does not depend on batch, order or machine.
    """
    key = seed.to_bytes(8, "little")
    digest = hashlib.blake2b(position.to_bytes(8, "little"), key=key, digest_size=8, person=use)
    return (int.from_bytes(digest.digest(), "little") >> 11) * 2.0**-53


@dataclass(frozen=True)
class Greedy:
    """Choose the token with the largest logit; the lowest token id among equal ones."""

    def start(self) -> None:
        return None

    def choose(self, logits: Tensor, uniform: float, state: None = None) -> tuple[int, None]:
        return int(logits.argmax()), None

    def choose_rows(self, logits: Tensor, uniforms: Sequence[float]) -> list[int]:
        """Return the token ids of rows `[sample, vocab]`."""
        return logits.argmax(-1).tolist()


@dataclass(frozen=True)
class RandomSampler:
    """Sample from the softmax by inverting its cumulative distribution at one uniform number."""

    def start(self) -> None:
        return None

    def choose(self, logits: Tensor, uniform: float, state: None = None) -> tuple[int, None]:
        return self.choose_rows(logits[None], [uniform])[0], None

    def choose_rows(self, logits: Tensor, uniforms: Sequence[float]) -> list[int]:
        """Return the token ids of rows `[sample, vocab]`, with one uniform number per row."""
        return sample_categorical(logits.double().softmax(-1), uniforms)


def sample_categorical(weights: Tensor, uniforms: Sequence[float]) -> list[int]:
    """Sample a token from each row of `weights` [sample, vocab] by its uniform number.

    Weights need not add up to one. For a single row, several numbers give a token each.
    """
    if weights.device.type != "cpu" or weights.dtype != torch.float64:
        return sample_categorical_parallel(weights, uniforms)
    # On a CPU, torch's cumulative sum is sequential, as numpy's, which takes eight times as long (2.6 against 0.3 ms
    # for 16 rows of 49,152). So it only rises at tokens with a weight.
    reached = weights.detach().cumsum(-1).numpy()
    totals = reached[:, -1]
    targets = np.minimum(np.array(uniforms) * totals, np.nextafter(totals, 0.0))
    rows = np.broadcast_to(reached, (len(targets), reached.shape[-1]))
    tokens = (row.searchsorted(target, "right") for row, target in zip(rows, targets, strict=True))
    return [int(token) % weights.shape[-1] for token in tokens]  # the first token if all weights are 0


def sample_categorical_parallel(weights: Tensor, uniforms: Sequence[float]) -> list[int]:
    """Sample like `sample_categorical` on any device; the tokens are equal if sums are rounded equally."""
    # A parallel sum may rise at tokens without weight, so only tokens with a weight are considered.
    reached = weights.cumsum(-1).masked_fill(weights == 0, -1.0)
    total = reached.amax(-1, keepdim=True)
    share = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)[:, None]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(share * total, below_total)
    return (reached > target).to(torch.uint8).argmax(-1).tolist()


def load_filter(part: CustomPart) -> Filter | NamedCombiner:
    """Build the filter or combiner that `part` names; raises WorkbenchError if it is neither."""
    made = load_custom(part)
    if callable(made):
        if (combiner := combiner_of(made, part)) is not None:
            return combiner
        check_arity(made, 2, f"filter {part.path}", "(logits, histories)")
        return cast(Filter, made)
    raise WorkbenchError(f"filter {part.path}: not callable; it needs __call__(self, logits, histories)")


def load_sampler(part: CustomPart) -> TokenSampler:
    """Build the sampler that `part` names; raises WorkbenchError if it is not a sampler."""
    return load_verbs(part, "sampler", {"start": "()", "choose": "(logits, uniform, state)"})
