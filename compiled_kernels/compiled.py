"""An operator's call as a compiler makes it: checked and timed in this form, since it is the one that runs
in a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from compiled_kernels.cases import Suite
from compiled_kernels.graphs import MOST_GRAPHS
from compiled_kernels.lanes import Lane


@contextmanager
def compiling() -> Iterator[None]:
    """Set what compiled forms need at their first call: many graphs of one function, no gradients."""
    limits = {"recompile_limit": MOST_GRAPHS, "accumulated_recompile_limit": MOST_GRAPHS}
    with torch.inference_mode(), torch._dynamo.config.patch(limits), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a compiler's advice to its own authors
        yield


def one_call(suite: Suite, lane: Lane) -> Callable[..., Any]:
    """Compile `suite.call` on a backend into one graph, as `form(*inputs)`.

    Shapes stay symbolic, so that cases share graphs; where that fails a case is compiled for its own shapes.
    """

    def call(*inputs: Any) -> Any:
        return suite.call(*inputs, lane=lane)

    symbolic = torch.compile(call, fullgraph=True, dynamic=True)
    static = torch.compile(call, fullgraph=True, dynamic=False)

    def form(*inputs: Any) -> Any:
        with compiling():
            try:
                return symbolic(*inputs)
            except Exception:  # any compiler exception; a fault of the case itself is raised again
                return static(*inputs)

    return form


def many_calls(suite: Suite, lane: Lane) -> Callable[[list[tuple]], list[Any]]:
    """Compile calls on each of a list of inputs into one graph, as a model's step holds many operators. The backend
    eager runs them one after another."""

    call = suite.timed_call or suite.call

    def calls(inputs: list[tuple]) -> list[Any]:
        return [call(*each, lane=lane) for each in inputs]

    return calls if lane is Lane.EAGER else torch.compile(calls, fullgraph=True, dynamic=False)
