"""torch.compile with a count: what Inductor has compiled, over the whole process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

MAX_GRAPHS = 512  # of one function, in one process


class _Graphs:
    """The backend: Inductor, and a count of the graphs it has compiled."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        from torch._inductor.compile_fx import compile_fx  # imports the whole compiler: only when used

        made = cast(Callable, compile_fx(graph, inputs))
        self.count += 1  # Dynamo may break a compilation off, and trace a function once more: that graph is no graph
        return made


_graphs = _Graphs()


def graph_count() -> int:
    """Return graphs compiled since the process began."""
    return _graphs.count


def _of_this_call(guards: Sequence) -> list[bool]:
    return [not (guard.is_global or guard.orig_guard.source.is_unspecialized_nn_module()) for guard in guards]


@functools.cache
def compile_once(function: FunctionType, dynamic: bool, cache_key: Hashable = None) -> Callable:
    """Compile `function` once for the whole process: runners of equal models share the result.

    torch checks at each call that every module and every global it met when it compiled is still the same, which takes
    a block's call 140 microseconds here. With a `cache_key` (equal only for modules of one structure and type of
    weights) there is one compilation for each key, and only tensors and other arguments are looked at again.
    """
    config = torch._dynamo.config
    # Every bucket of rows and every kind of block is one more entry for the same code.
    config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, MAX_GRAPHS)
    options: dict[str, Any] | None = None
    if cache_key is not None:
        # Compiled code is kept by code object: each key needs a separate one.
        function = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        options = {"guard_filter_fn": _of_this_call}
    return torch.compile(function, backend=_graphs, dynamic=dynamic, fullgraph=True, options=options)
