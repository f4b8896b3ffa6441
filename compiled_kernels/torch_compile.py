"""Call torch.compile, and count Inductor's compilations in the whole process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

MAX_GRAPHS = 512  # maximum graphs of one function in one process


class _Graphs:
    """The torch.compile backend: Inductor, with a count of the graphs it has compiled."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        from torch._inductor.compile_fx import compile_fx  # imports the whole compiler: only when used

        made = cast(Callable, compile_fx(graph, inputs))
        self.count += 1  # Dynamo may break a compilation off, and trace a function once more: that graph is no graph
        return made


_graphs = _Graphs()


def graph_count() -> int:
    """Return the number of graphs compiled since the process began."""
    return _graphs.count


def _of_this_call(guards: Sequence) -> list[bool]:
    return [not (guard.is_global or guard.orig_guard.source.is_unspecialized_nn_module()) for guard in guards]


@functools.cache
def compile_once(function: FunctionType, dynamic: bool, cache_key: Hashable = None) -> Callable:
    """Compile `function` once for the whole process: runners of equal models share the result.

    At each call torch checks that every module and every global in the compiled code is still the same; for a block
    this takes 140 microseconds here. With a `cache_key` (equal only for modules of one structure and type of weights)
    there is one compilation for each key, and only tensors and other arguments are looked at again.
    """
    config = torch._dynamo.config
    # Every bucket of rows and every kind of block adds an entry for the same code.
    config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, MAX_GRAPHS)
    options: dict[str, Any] | None = None
    if cache_key is not None:
        # torch caches compiled code by code object, so each key needs a separate one.
        function = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        options = {"guard_filter_fn": _of_this_call}
    return torch.compile(function, backend=_graphs, dynamic=dynamic, fullgraph=True, options=options)
