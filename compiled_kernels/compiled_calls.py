"""Compile calls of operators with torch.compile. Checks and benchmarks run this compiled form, as a model does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from compiled_kernels.backends import Backend
from compiled_kernels.cases import Suite
from compiled_kernels.torch_compile import MAX_GRAPHS


@contextmanager
def compile_context() -> Iterator[None]:
    """Configure the first call of compiled forms: allow many graphs of one function, disable gradients."""
    limits = {"recompile_limit": MAX_GRAPHS, "accumulated_recompile_limit": MAX_GRAPHS}
    with torch.inference_mode(), torch._dynamo.config.patch(limits), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings for compiler developers
        yield


def compile_call(suite: Suite, backend: Backend) -> Callable[..., Any]:
    """Compile `suite.call` on a backend into one graph, as `form(*inputs)`.

    Shapes stay symbolic, so that cases share graphs; if that fails, a case is compiled for its own shapes.
    """

    def call(*inputs: Any) -> Any:
        return suite.call(*inputs, backend=backend)

    symbolic = torch.compile(call, fullgraph=True, dynamic=True)
    static = torch.compile(call, fullgraph=True, dynamic=False)

    def form(*inputs: Any) -> Any:
        with compile_context():
            try:
                return symbolic(*inputs)
            except Exception:  # any compiler exception; errors of the case itself recur below
                return static(*inputs)

    return form


def compile_calls(suite: Suite, backend: Backend) -> Callable[[list[tuple]], list[Any]]:
    """Compile the calls on a list of inputs into one graph, since a model's step has many operators. On the backend
    eager, the calls run one after another without a graph.
    """

    call = suite.benchmark_call or suite.call

    def calls(inputs: list[tuple]) -> list[Any]:
        return [call(*each, backend=backend) for each in inputs]

    return calls if backend is Backend.EAGER else torch.compile(calls, fullgraph=True, dynamic=False)
