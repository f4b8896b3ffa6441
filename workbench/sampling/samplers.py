"""Sample one token from one row of filtered logits. Samplers are frozen values; state is passed.

A sampler has two verbs. `start()` returns the initial state of a request. `choose(logits, uniform, state)` takes a row
`[vocab]`, one number in [0, 1) and the state, and returns the token id and the next state. The caller keeps the state,
one for each request, so nothing can leak from one request into another. User-defined filters and samplers are loaded by
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

    An answer that ends before another token has a `finish_reason` and the `token_id` -1.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # most probable first, equal ones by token id
    error: str = ""
    finish_reason: FinishReason | None = None  # where the request's constraint lets nothing follow


def failed_token(error: str) -> SampledToken:
    return SampledToken(-1, error=error)


def with_logprobs(token: int, scores: Tensor, filtered: Tensor, sampling: SamplingParameters) -> SampledToken:
    """Return the token with the requested log-probabilities, of the model or of the filtered distribution."""
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

    It depends only on a request's seed, the position of the token in its output, and its use, so that no batch, order
    or machine can change a sample.
    """
    key = seed.to_bytes(8, "little")
    digest = hashlib.blake2b(position.to_bytes(8, "little"), key=key, digest_size=8, person=use)
    return (int.from_bytes(digest.digest(), "little") >> 11) * 2.0**-53


@dataclass(frozen=True)
class Greedy:
    """Take the largest logit; of equal ones the lowest token id."""

    def start(self) -> None:
        return None

    def choose(self, logits: Tensor, uniform: float, state: None = None) -> tuple[int, None]:
        return int(logits.argmax()), None

    def choose_rows(self, logits: Tensor, uniforms: Sequence[float]) -> list[int]:
        """Return the token ids of rows `[sample, vocab]`."""
        return logits.argmax(-1).tolist()


@dataclass(frozen=True)
class RandomSampler:
    """Sample from the softmax by inverting its distribution function with one uniform number."""

    def start(self) -> None:
        return None

    def choose(self, logits: Tensor, uniform: float, state: None = None) -> tuple[int, None]:
        return self.choose_rows(logits[None], [uniform])[0], None

    def choose_rows(self, logits: Tensor, uniforms: Sequence[float]) -> list[int]:
        """Return the token ids of rows `[sample, vocab]`, with one uniform number per row."""
        return sample_categorical(logits.double().softmax(-1), uniforms)


def sample_categorical(weights: Tensor, uniforms: Sequence[float]) -> list[int]:
    """Sample a token from each row of `weights` [sample, vocab] by its uniform number.

    Weights need not add up to one. A single row takes many numbers, and gives a token for each.
    """
    if weights.device.type != "cpu" or weights.dtype != torch.float64:
        return sample_categorical_parallel(weights, uniforms)
    # On a CPU torch adds a row up one after the other, as numpy does in eight times the time (2.6 against 0.3 ms for 16
    # rows of 49,152): it rises only where something was added.
    reached = weights.detach().cumsum(-1).numpy()
    totals = reached[:, -1]
    targets = np.minimum(np.array(uniforms) * totals, np.nextafter(totals, 0.0))
    rows = np.broadcast_to(reached, (len(targets), reached.shape[-1]))
    tokens = (row.searchsorted(target, "right") for row, target in zip(rows, targets, strict=True))
    return [int(token) % weights.shape[-1] for token in tokens]  # where nothing has any weight, the first


def sample_categorical_parallel(weights: Tensor, uniforms: Sequence[float]) -> list[int]:
    """Sample like `sample_categorical` on any device, with the same tokens where sums are rounded alike."""
    # A parallel sum may rise where nothing was added: only tokens of some weight are looked at.
    reached = weights.cumsum(-1).masked_fill(weights == 0, -1.0)
    total = reached.amax(-1, keepdim=True)
    share = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)[:, None]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(share * total, below_total)
    return (reached > target).to(torch.uint8).argmax(-1).tolist()


def load_filter(part: CustomPart) -> Filter | NamedCombiner:
    """Build the filter or combiner that `part` names; WorkbenchError if it cannot be one."""
    made = load_custom(part)
    if callable(made):
        if (combiner := combiner_of(made, part)) is not None:
            return combiner
        check_arity(made, 2, f"filter {part.path}", "(logits, histories)")
        return cast(Filter, made)
    raise WorkbenchError(f"filter {part.path}: not callable; it needs __call__(self, logits, histories)")


def load_sampler(part: CustomPart) -> TokenSampler:
    """Build the sampler that `part` names; WorkbenchError if it cannot be one."""
    return load_verbs(part, "sampler", {"start": "()", "choose": "(logits, uniform, state)"})
