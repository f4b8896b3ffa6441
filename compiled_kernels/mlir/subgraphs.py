"""Compile and replace subgraphs for the torch.compile backend, and report which were compiled."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from inspect import isbuiltin
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.passes.utils.fuser_utils import fuse_as_graphmodule

from compiled_kernels.backends import BackendError
from compiled_kernels.mlir.compile import compile_text
from compiled_kernels.mlir.leaf import PreparedKernel
from compiled_kernels.mlir.lower import lower_graph


@dataclass(frozen=True)
class Subgraph:
    """Some operations of graph number `graph`: compiled here if `taken` (`digest` names the code), otherwise left to
    `fallback`.
    """

    graph: int
    taken: bool
    operations: tuple[str, ...]
    fallback: str
    reason: str
    digest: str = ""

    def __str__(self) -> str:
        what = ", ".join(f"{self.operations.count(name)} {name}" for name in dict.fromkeys(self.operations))
        verb = f"taken ({self.digest[:12]})" if self.taken else f"left to {self.fallback}"
        return f"graph {self.graph}: {verb}: {what or 'nothing'}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class CompileReport:
    """The subgraphs that were compiled or left, in the order in which their graphs were compiled."""

    subgraphs: tuple[Subgraph, ...]

    @property
    def taken(self) -> tuple[Subgraph, ...]:
        return tuple(each for each in self.subgraphs if each.taken)

    @property
    def left(self) -> tuple[Subgraph, ...]:
        return tuple(each for each in self.subgraphs if not each.taken)

    def data(self) -> list[dict[str, Any]]:
        return [asdict(each) for each in self.subgraphs]

    def __str__(self) -> str:
        return "\n".join(str(each) for each in self.subgraphs) or "no graph was compiled yet"


def short_names(operations: Sequence[Any]) -> tuple[str, ...]:
    """Return short names of operations, such as `add.Tensor`."""
    plain = (each.__name__ if isbuiltin(each) else str(each) for each in operations)
    return tuple(name.removeprefix("aten.").removeprefix("prims.") for name in plain)


class SubgraphKernel(torch.nn.Module):
    """A module that runs one subgraph as one compiled function, directly on the tensors' memory."""

    def __init__(self, module: GraphModule, outputs: Sequence[Node]):
        super().__init__()
        name = "subgraph"  # one name, so that equal subgraphs are one artifact
        stages = lower_graph(module.graph, name, lanes=64)
        text = stages.pop("bufferized")
        self.kernel = compile_text(text, name, lowered_from="bufferized", before=stages)
        shapes = tuple((tuple(node.meta["val"].shape), node.meta["val"].dtype) for node in outputs)
        places = len(module.graph.find_nodes(op="placeholder"))
        run = self.kernel.function(places + len(outputs))
        self.prepared = PreparedKernel(run, self.kernel, frozenset(range(places)), shapes)

    def forward(self, *inputs: Tensor) -> Any:
        return self.prepared(*inputs)


@dataclass(frozen=True)
class PlacedSubgraph:
    """The kernel of a subgraph, called `name`, with the graph nodes that it reads and the nodes that it replaces."""

    name: str
    kernel: SubgraphKernel
    inputs: Sequence[Node]
    outputs: Sequence[Node]


def compile_subgraph(graph: GraphModule, part: Sequence[Node], name: str) -> PlacedSubgraph | str:
    """Compile a subgraph without changing the graph; return its kernel, or the reason if it cannot be lowered."""
    module, inputs, outputs = fuse_as_graphmodule(graph, list(part), name)
    for given, node in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        given.meta = dict(node.meta)
    try:
        return PlacedSubgraph(name, SubgraphKernel(module, outputs), tuple(inputs), tuple(outputs))
    except (BackendError, ValueError, RuntimeError) as error:  # MLIR raises all of these
        return " ".join(str(error).split())[:300]


def replace_subgraph(
    graph: GraphModule, part: Sequence[Node], placed: PlacedSubgraph, standing: dict[Node, Node]
) -> None:
    """Replace a subgraph by its kernel; `standing` maps nodes replaced by earlier kernels to their new nodes."""
    graph.add_submodule(placed.name, placed.kernel)
    with graph.graph.inserting_before(part[0]):
        called = graph.graph.call_module(placed.name, tuple(standing.get(node, node) for node in placed.inputs))
        results = [called] if len(placed.outputs) == 1 else [
            graph.graph.call_function(operator.getitem, (called, at)) for at in range(len(placed.outputs))
        ]  # fmt: skip
    for old, new in zip(placed.outputs, results, strict=True):
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
        standing[old] = new
    for node in reversed(part):
        graph.graph.erase_node(node)
