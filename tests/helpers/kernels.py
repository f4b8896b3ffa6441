"""What tests of kernels share: whether a backend works here, and one comparison with float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from compiled_kernels import Backend, backend_problems
from compiled_kernels.agreement import disagreement
from compiled_kernels.cases import Case, CaseCost, Suite, suite_of

PROBLEMS = backend_problems()


def needs(backend: Backend) -> pytest.MarkDecorator:
    """Return the mark that skips a test where the backend does not work."""
    return pytest.mark.skipif(PROBLEMS[backend] is not None, reason=f"backend {backend}: {PROBLEMS[backend]}")


needs_mlir = needs(Backend.MLIR)


def kernel_problem(
    suite: Suite | str, backend: Backend, arguments: Mapping[str, Any], seed: int = 0, inputs: tuple | None = None
) -> str | None:
    """Return how a backend's result differs from float64's on inputs of these arguments; None where it does not.
    Memory that nothing has written is NaN."""
    suite = suite_of(suite) if isinstance(suite, str) else suite
    if inputs is None:
        inputs = suite.input_maker(torch.Generator().manual_seed(seed), **arguments)
    return disagreement(suite, Case("chosen", arguments, CaseCost(0, 0)), inputs, backend)


def with_call(operator: str, call: Any) -> Suite:
    """Return the operator's suite with the backend's call replaced by `call(*inputs)`; the specification stays."""
    suite = suite_of(operator)

    def either(*inputs: Any, backend: Backend) -> Any:
        return suite.call(*inputs, backend=backend) if backend is Backend.EAGER else call(*inputs)

    return replace(suite, call=either, exact=suite.exact)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Have torch, and kernels with it, use `count` threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
