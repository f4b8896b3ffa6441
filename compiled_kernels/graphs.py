"""torch.compile with a count: what Inductor was given, over the whole process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

MOST_GRAPHS = 512  # of one function, in one process


class _Graphs:
    """The backend: Inductor, and a count of the graphs it was given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        from torch._inductor.compile_fx import compile_fx  # imports the whole compiler: only when used

        self.count += 1
        return cast(Callable, compile_fx(graph, inputs))


_graphs = _Graphs()


def graph_count() -> int:
    """Graphs compiled since the process began."""
    return _graphs.count


@functools.cache
def compiled(function: Callable, dynamic: bool) -> Callable:
    """`function` compiled, once for the whole process: runners of models alike share what is compiled."""
    config = torch._dynamo.config
    # Every bucket of rows and every kind of block is one more entry for the same code.
    config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, MOST_GRAPHS)
    return torch.compile(function, backend=_graphs, dynamic=dynamic, fullgraph=True)
