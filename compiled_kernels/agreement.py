"""Compare backends with the specification. A backend is right if, row by row, its error against float64 is at most the
error of the eager backend in the same precision, plus a rounding term. A row is along an output's last axis.

The rounding term is `scale` x (`terms` x the epsilon of float32 + the epsilon of the output's type): it allows for sums
in float32 in another order, and for one rounding. `scale` is the size of the numbers that are added. The errors of n
additions, each of at most half an epsilon, form a random walk: their standard deviation, in epsilons of the sum's size,
is about sqrt(n / 8) for terms of mixed sign and sqrt(n / 12) for terms of one sign (Higham and Mary, 2019), so `terms`
= sqrt(n) plus a small constant is three deviations.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_kernels.backends import Backend

if TYPE_CHECKING:
    from compiled_kernels.cases import Case, Suite


def disagreement(
    suite: Suite, case: Case, inputs: tuple, backend: Backend, form: Callable[..., Any] | None = None
) -> str | None:
    """Compare a backend with the specification on one case.

    Args:
        suite: the operator's cases, with its specification in float64.
        case: the case of `inputs`; its arguments determine the rounding term.
        inputs: arguments of the operator, built by `suite`.
        backend: the backend under test.
        form: a compiled form called as `form(*inputs)` in place of the suite's call. Without it, memory allocated by
            torch is filled with NaN first.

    Returns:
        A description of the first disagreement; None if the backend is right.
    """
    given = form(*inputs) if form else on_nan_memory(suite, inputs, backend)
    return output_disagreement(suite, case, inputs, given)


def on_nan_memory(suite: Suite, inputs: tuple, backend: Backend) -> Any:
    """Run the operator of `suite` with newly allocated memory filled with NaN."""
    with nan_filled_memory():
        return suite.call(*inputs, backend=backend)


def output_disagreement(suite: Suite, case: Case, inputs: tuple, given: Any) -> str | None:
    """Compare a backend's output `given` with the specification's; return what differs, or None (see
    `disagreement`).
    """
    ours = _outputs(given)
    exact, eager = _outputs(suite.exact(*inputs)), _outputs(suite.call(*inputs, backend=Backend.EAGER))
    scale = None if suite.scale is None else suite.scale(*inputs)
    terms = suite.rounding_terms(**case.arguments)
    for index, (true, plain, given) in enumerate(zip(exact, eager, ours, strict=True)):
        if given.shape != plain.shape or given.dtype != plain.dtype:
            return f"output {index} is {list(given.shape)} {given.dtype}, not {list(plain.shape)} {plain.dtype}"
        if not plain.is_floating_point():
            if not torch.equal(plain, given):
                return f"output {index} differs in {int((plain != given).sum())} of {plain.numel()} integers"
            continue
        rounding = terms * torch.finfo(torch.float32).eps + torch.finfo(plain.dtype).eps
        if wrong := _beyond(true, plain.double(), given.double(), scale, rounding):
            return f"output {index}: {wrong}"
    return None


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Fill the results of torch.empty and similar functions with NaN (integers with their maximum), so that unwritten
    memory is detected.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore warnings of nondeterministic operations, which are irrelevant here
        torch._C._set_deterministic_algorithms(True, warn_only=True)  # the public one imports Inductor, in 2 s
        try:
            yield
        finally:
            torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])


def _outputs(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _beyond(true: Tensor, plain: Tensor, given: Tensor, scale: Tensor | None, rounding: float) -> str | None:
    for word, odd in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        if not torch.equal(odd(true), odd(given)):
            return f"{int(odd(given).sum())} {word} where the specification has {int(odd(true).sum())}, or elsewhere"
    if not true.numel():
        return None
    finite = true.isfinite()
    true, plain, given = (torch.where(finite, part, 0.0) for part in (true, plain, given))
    size = true.abs().amax(-1, keepdim=True)
    if scale is not None:
        size = torch.maximum(size, torch.where(finite, scale, 0.0))
    eager_error, error = (plain - true).abs().amax(-1, keepdim=True), (given - true).abs()
    bound = eager_error + size * rounding + torch.finfo(torch.float32).tiny
    over = error / bound
    if bool((over <= 1).all()):
        return None
    at = int(over.nan_to_num(torch.inf).argmax())
    place = [int(each) for each in torch.unravel_index(torch.tensor(at), over.shape)]
    ours, theirs, most = (float(part.expand_as(over).flatten()[at]) for part in (error, eager_error, bound))
    return f"error {ours:.2e} against float64 at {place}; eager makes {theirs:.2e} in that row, bound {most:.2e}"
