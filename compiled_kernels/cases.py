"""Define the cases of every operator, in one list for three uses: correctness on all backends (see agreement.py),
hypothesis and benchmarks.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_kernels.backends import Backend, BackendError

PACKAGES = (
    "rms_norm", "rotary", "gated", "linear", "expert_linear", "kv_write", "paged_attention",
    "quantized_attention", "top_logprobs",
)  # fmt: skip


@dataclass(frozen=True)
class CaseCost:
    """Lower bounds for one case: the bytes to move and the floating-point operations to compute."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Case:
    """One input of an operator: `arguments` are passed to the suite's `input_maker`; `timed` cases are also
    benchmarks.
    """

    shape: str
    arguments: Mapping[str, Any]
    cost: CaseCost
    timed: bool = False

    @property
    def name(self) -> str:
        """Return the case's name, such as `1x576 bfloat16`, which the table of gaps matches."""
        return f"{self.shape} {str(self.arguments['dtype']).removeprefix('torch.')}"


def map_tensors(change: Callable[[Tensor], Any], inputs: Any) -> Any:
    """Return `inputs`, a tuple of tensors, numbers and tuples of them, with every tensor replaced by `change` of it."""
    return tree_map_only(Tensor, change, inputs)


def in_float64(inputs: tuple) -> tuple:
    """Return `inputs` with every floating-point tensor converted to float64."""
    return map_tensors(lambda part: part.double() if part.is_floating_point() else part, inputs)


def _exact(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: call(*in_float64(inputs), backend=Backend.EAGER)


@dataclass(frozen=True)
class Suite:
    """The cases of an operator, with the functions that make inputs, run it and specify its result.

    Attributes:
        input_maker: `input_maker(generator, **arguments)` makes the operator's arguments.
        call: `call(*inputs, backend=backend)` runs the operator and returns its output.
        exact: `exact(*inputs)` returns the specification's output in float64.
        rounding_terms: allowed error of an output in float32 epsilons of `scale` (see agreement.py).
        scale: `scale(*inputs)`, in float64, is the magnitude of each output's addends, if it may exceed the row's
            largest output.
        benchmark_call: the call to time, if `call` does more than the operator.
    """

    operator: str
    input_maker: Callable[..., tuple]
    call: Callable[..., Any]
    cases: tuple[Case, ...]
    rounding_terms: Callable[..., float]
    exact: Callable[..., Any] = field(default=None)  # type: ignore[assignment] (`__post_init__` fills it in)
    scale: Callable[..., Tensor] | None = None
    benchmark_call: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.exact is None:
            object.__setattr__(self, "exact", _exact(self.call))

    def make_inputs(self, case: Case, seed: int = 0) -> tuple:
        return self.input_maker(torch.Generator().manual_seed(seed), **case.arguments)


def suites() -> tuple[Suite, ...]:
    """Return the suites of all operators, in the order in which a decoder block runs them."""
    modules = [importlib.import_module(f"compiled_kernels.{package}.cases") for package in PACKAGES]
    return tuple(suite for module in modules for suite in module.SUITES)


def suite_of(operator: str) -> Suite:
    """Return the suite of one operator. Raises BackendError for an unknown name."""
    every = {suite.operator: suite for suite in suites()}
    return every[require_known("operator", operator, every)]


def case_of(suite: Suite, name: str | None) -> Case:
    """Return the case `name`, or by default the first timed case. Raises BackendError for an unknown name."""
    if name is None:
        return next((case for case in suite.cases if case.timed), suite.cases[0])
    every = {case.name: case for case in suite.cases}
    return every[require_known(f"case of {suite.operator}", name, every)]


def require_known(kind: str, word: str, words: Iterable[str]) -> str:
    """Return `word` if it is in `words`. Otherwise raise BackendError with the nearest words and all words."""
    words = [str(each) for each in words]
    if word in words:
        return word
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    nearest = f"; did you mean {close[0]!r}?" if close else ""
    raise BackendError(f"unknown {kind} {word!r}{nearest}; known: {', '.join(words)}")


def random_normal(generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Draw standard normal numbers in float32 and round them to `dtype`."""
    return torch.randn(shape, generator=generator).to(dtype)
