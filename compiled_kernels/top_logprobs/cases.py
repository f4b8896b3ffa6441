from __future__ import annotations

import math

import torch

import compiled_kernels
from compiled_kernels.cases import Case, CaseCost, Suite


def inputs(generator: torch.Generator, samples: int, vocab: int, dtype: torch.dtype) -> tuple:
    """Draw distinct logits in random order, so that rounding cannot change the order of entries."""
    ranks = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(samples)])
    return ((ranks.float() - vocab / 2) * (20.0 / vocab),) if dtype == torch.float32 else (ranks.to(dtype) * 0.05,)


def inputs_with_count(generator: torch.Generator, samples: int, vocab: int, dtype: torch.dtype, count: int) -> tuple:
    return *inputs(generator, samples, vocab, dtype), count


def cases(**more: int) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{samples}x{vocab}" + (f" top {more['count']}" if more else ""),
            {"samples": samples, "vocab": vocab, "dtype": torch.float32, **more},
            CaseCost((1 if more else 2) * samples * vocab * 4, 4 * samples * vocab),
            timed=vocab > 1000,
        )
        for samples, vocab in [(1, 32_768), (1, 49_152), (16, 49_152), (64, 32_768), (3, 257), (2, 5)]
    )


def terms(vocab: int, **_: object) -> float:
    return 8 + math.sqrt(vocab)


def size(logits: torch.Tensor, *_: int) -> torch.Tensor:
    """Return the size that bounds the error of a row's log probabilities: a relative error of the softmax's sum becomes
    an equal absolute error of its logarithm, so it is at least 1."""
    return torch.where(logits.isfinite(), logits.double().abs(), 1.0).amax(-1, keepdim=True).clamp_min(1.0)


SUITES = (
    Suite("log_softmax", inputs, compiled_kernels.log_softmax, cases(), terms, scale=size),
    Suite(
        "top_logprobs",
        inputs_with_count,
        compiled_kernels.top_logprobs,
        cases(count=5) + cases(count=1),
        terms,
        scale=size,
    ),
)
