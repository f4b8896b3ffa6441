"""Compute log-softmax over the vocabulary and its largest entries, for sampling and for log probabilities."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from compiled_kernels.backends import Backend
from compiled_kernels.operators import Lowered, define_operator


def log_softmax_reference(logits: Tensor) -> Tensor:
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    shifted = exact - exact.amax(dim=-1, keepdim=True)
    return (shifted - shifted.exp().sum(dim=-1, keepdim=True).log()).to(logits.dtype)


def top_logprobs_reference(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    # Ordered by the logits themselves: rounding a log probability must not make neighbours equal.
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return log_softmax_reference(logits).gather(-1, ids), ids


LOG_SOFTMAX = define_operator(
    "log_softmax",
    "(Tensor logits) -> Tensor",
    lambda logits: torch.empty_like(logits, memory_format=torch.contiguous_format),
    {Backend.MLIR: Lowered(log_softmax_reference)},  # no schedule for vectors: LLVM's own interleaves the sums better
)
TOP_LOGPROBS = define_operator(
    "top_logprobs",
    "(Tensor logits, int count) -> (Tensor, Tensor)",
    lambda logits, count: (
        logits.new_empty(logits.shape[0], count),
        logits.new_empty((logits.shape[0], count), dtype=torch.int64),
    ),
    {Backend.TRITON: "compiled_kernels.top_logprobs.triton:top_logprobs"},
)


def log_softmax(
    logits: Float[Tensor, "sample vocab"], backend: Backend = Backend.EAGER
) -> Float[Tensor, "sample vocab"]:
    """Compute logits - log(sum(exp(logits))) of each row, in float32; the result has the type of `logits`. Minus
    infinity stays.
    """
    if backend in (Backend.EAGER, Backend.INDUCTOR):
        return log_softmax_reference(logits)
    return LOG_SOFTMAX.implementation(backend)(logits)


def top_logprobs(
    logits: Float[Tensor, "sample vocab"], count: int, backend: Backend = Backend.EAGER
) -> tuple[Tensor, Tensor]:
    """Return the `count` largest log probabilities of each row and their token ids, both [sample, count].

    Largest first, equal ones by token id. The log probabilities have the type of `logits`.
    """
    if backend in (Backend.EAGER, Backend.INDUCTOR):
        return top_logprobs_reference(logits, count)
    return TOP_LOGPROBS.implementation(backend)(logits, count)
