"""One list of cases an operator: for correctness on every lane (see agreement.py), for hypothesis, and for
measurement."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compiled_kernels.agreement import disagreement
from compiled_kernels.lanes import Lane, LaneError

__all__ = ["Case", "Suite", "Work", "case_of", "disagreement", "known", "random", "suite_of", "suites"]
PACKAGES = (
    "rms_norm", "rotary", "gated", "linear", "linear_w8a8", "expert_linear", "kv_write", "paged_attention",
    "quantized_attention", "top_logprobs",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What a case must move and compute at the least."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Case:
    """`arguments` are what the suite's `inputs` takes; `timed` cases are benchmarks too."""

    shape: str
    arguments: Mapping[str, Any]
    work: Work
    timed: bool = False

    @property
    def name(self) -> str:
        """`1x576 bfloat16`; what the gap table matches."""
        return f"{self.shape} {str(self.arguments['dtype']).removeprefix('torch.')}"


def _exact(call: Callable[..., Any]) -> Callable[..., Any]:
    def in_float64(*values: Any) -> Any:
        wide = [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values]
        return call(*wide, lane=Lane.EAGER)

    return in_float64


@dataclass(frozen=True)
class Suite:
    """An operator's cases.

    `inputs(generator, **arguments)` makes the operator's arguments, `call(*inputs, lane=lane)` carries it out and
    gives what it wrote, `exact(*inputs)` is the same in float64 by the specification. `terms(**arguments)` is how many
    float32 epsilons of `scale` an output may be off (see agreement.py); `scale(*inputs)`, in float64, how large what is
    added up for each output is, where that may be larger than the largest of its row. `timed_call` is what is timed,
    where `call` does more than the operator.
    """

    operator: str
    inputs: Callable[..., tuple]
    call: Callable[..., Any]
    cases: tuple[Case, ...]
    terms: Callable[..., float]
    exact: Callable[..., Any] = field(default=None)  # type: ignore[assignment]  # filled in below
    scale: Callable[..., Tensor] | None = None
    timed_call: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.exact is None:
            object.__setattr__(self, "exact", _exact(self.call))

    def make(self, case: Case, seed: int = 0) -> tuple:
        return self.inputs(torch.Generator().manual_seed(seed), **case.arguments)


def suites() -> tuple[Suite, ...]:
    """Every operator's, in the order of a block."""
    modules = [importlib.import_module(f"compiled_kernels.{package}.cases") for package in PACKAGES]
    return tuple(suite for module in modules for suite in module.SUITES)


def suite_of(operator: str) -> Suite:
    """The suite of one operator. Raises LaneError for a name that is none."""
    every = {suite.operator: suite for suite in suites()}
    return every[known("operator", operator, every)]


def case_of(suite: Suite, name: str | None) -> Case:
    """The case called `name`, or the first that is timed. Raises LaneError for a name that is none."""
    if name is None:
        return next((case for case in suite.cases if case.timed), suite.cases[0])
    every = {case.name: case for case in suite.cases}
    return every[known(f"case of {suite.operator}", name, every)]


def known(kind: str, word: str, words: Iterable[str]) -> str:
    """`word`, where it is one of `words`; else LaneError with the nearest and all of them."""
    words = [str(each) for each in words]
    if word in words:
        return word
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    nearest = f"; did you mean {close[0]!r}?" if close else ""
    raise LaneError(f"unknown {kind} {word!r}{nearest}; known: {', '.join(words)}")


def random(generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers, drawn in float32."""
    return torch.randn(shape, generator=generator).to(dtype)
