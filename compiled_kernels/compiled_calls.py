"""An operator's call as a compiler makes it: checked and timed in this form, since it is the one that runs
in a model."""

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
    """Set what compiled forms need at their first call: many graphs of one function, no gradients."""
    limits = {"recompile_limit": MAX_GRAPHS, "accumulated_recompile_limit": MAX_GRAPHS}
    with torch.inference_mode(), torch._dynamo.config.patch(limits), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a compiler's advice to its own authors
        yield


def compile_call(suite: Suite, backend: Backend) -> Callable[..., Any]:
    """Compile `suite.call` on a backend into one graph, as `form(*inputs)`.

    Shapes stay symbolic, so that cases share graphs; where that fails a case is compiled for its own shapes.
    """

    def call(*inputs: Any) -> Any:
        return suite.call(*inputs, backend=backend)

    symbolic = torch.compile(call, fullgraph=True, dynamic=True)
    static = torch.compile(call, fullgraph=True, dynamic=False)

    def form(*inputs: Any) -> Any:
        with compile_context():
            try:
                return symbolic(*inputs)
            except Exception:  # any compiler exception; a fault of the case itself is raised again
                return static(*inputs)

    return form


def compile_calls(suite: Suite, backend: Backend) -> Callable[[list[tuple]], list[Any]]:
    """Compile calls on each of a list of inputs into one graph, as a model's step holds many operators. The backend
    eager runs them one after another."""

    call = suite.benchmark_call or suite.call

    def calls(inputs: list[tuple]) -> list[Any]:
        return [call(*each, backend=backend) for each in inputs]

    return calls if backend is Backend.EAGER else torch.compile(calls, fullgraph=True, dynamic=False)
