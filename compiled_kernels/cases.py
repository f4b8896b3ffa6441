"""One list of cases an operator: for correctness on every lane, for hypothesis, and for measurement.

A lane is right where its error against float64 is at most that of the eager lane in the same precision, plus a
rounding term: `terms` additions in float32 in another order, and one rounding to the output's type.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compiled_kernels.lanes import Lane, LaneError

PACKAGES = (
    "rms_norm", "rotary", "gated", "linear", "expert_linear", "kv_write", "paged_attention", "quantized_attention",
    "top_logprobs",
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
    gives what it wrote, `exact(*inputs)` is the same in float64 by the specification, and `terms(**arguments)` how
    many numbers are added up for one of the output.
    """

    operator: str
    inputs: Callable[..., tuple]
    call: Callable[..., Any]
    cases: tuple[Case, ...]
    terms: Callable[..., int]
    exact: Callable[..., Any] = field(default=None)  # type: ignore[assignment]  # filled in below

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


def disagreement(
    suite: Suite, case: Case, inputs: tuple, lane: Lane, form: Callable[..., Any] | None = None
) -> str | None:
    """What is wrong with `lane` on these inputs, in words; None where it is right.

    `form(*inputs)` stands in for the suite's call on that lane: what a compiler made of it.
    """
    ours = _outputs(form(*inputs) if form else suite.call(*inputs, lane=lane))
    exact, eager = _outputs(suite.exact(*inputs)), _outputs(suite.call(*inputs, lane=Lane.EAGER))
    terms = suite.terms(**case.arguments)
    for index, (true, plain, given) in enumerate(zip(exact, eager, ours, strict=True)):
        if given.shape != plain.shape or given.dtype != plain.dtype:
            return f"output {index} is {list(given.shape)} {given.dtype}, not {list(plain.shape)} {plain.dtype}"
        if not plain.is_floating_point():
            if not torch.equal(plain, given):
                return f"output {index} differs in {int((plain != given).sum())} of {plain.numel()} integers"
            continue
        if wrong := _beyond(true, plain.double(), given.double(), terms, plain.dtype):
            return f"output {index}: {wrong}"
    return None


def _outputs(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _beyond(true: Tensor, plain: Tensor, given: Tensor, terms: int, dtype: torch.dtype) -> str | None:
    if not torch.equal(true.isnan(), given.isnan()):
        return f"{int(given.isnan().sum())} NaN where the specification has {int(true.isnan().sum())}"
    true, plain, given = (part.nan_to_num(0.0) for part in (true, plain, given))
    if not true.numel():
        return None
    scale = float(true.abs().max()) + 1e-30
    eager_error, error = float((plain - true).abs().max()), float((given - true).abs().max())
    bound = eager_error + scale * (terms * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps)
    return (
        None
        if error <= bound
        else f"error {error:.2e} against float64; eager makes {eager_error:.2e}, bound {bound:.2e}"
    )
