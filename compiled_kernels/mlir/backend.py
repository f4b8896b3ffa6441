"""Run supported subgraphs on the backend mlir, in process: `torch.compile(backend="workbench_mlir")`.

Importing this module registers the backend under that name. The report shows where other operations run: operations
around a compiled subgraph run in eager torch; graphs without a compiled subgraph are compiled by Inductor. A warning is
given for supported operations that do not compile.
"""

# The type stubs of these optional packages do not list their exports.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.tools_common import legalize_graph

from compiled_kernels.backends import BackendError, _mlir_problem
from compiled_kernels.mlir import supported as suited
from compiled_kernels.mlir.subgraphs import (
    CompileReport,
    PlacedSubgraph,
    Subgraph,
    compile_subgraph,
    replace_subgraph,
    short_names,
)

NAME = "workbench_mlir"


class DynamoBackend:
    """A backend for torch.compile that records what it compiled; `backend=DynamoBackend()` has a separate report."""

    def __init__(self) -> None:
        self._done: list[Subgraph] = []
        self._graphs = itertools.count()

    def report(self) -> CompileReport:
        return CompileReport(tuple(self._done))

    def __call__(self, graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Compile one graph. Raises BackendError for any option, because there are none."""
        if options:
            given = ", ".join(f"{name}={value!r}" for name, value in options.items())
            raise BackendError(f"backend {NAME} takes no options; {given} given")
        if problem := _mlir_problem():
            raise BackendError(f"backend {NAME}: {problem}")
        from torch._dynamo.backends.common import aot_autograd
        from torch_mlir.extras.fx_decomp_util import get_decomposition_table

        compiler = aot_autograd(
            fw_compiler=self._leave_training,
            bw_compiler=self._leave_training,
            inference_compiler=self._take,
            decompositions=get_decomposition_table(),
            keep_inference_input_mutations=True,
        )
        return compiler(graph, inputs)

    def _leave_training(self, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        return self._leave_all(
            next(self._graphs), graph, inputs, "gradients are required: this backend is for inference"
        )

    def _leave_all(self, number: int, graph: GraphModule, inputs: Sequence[Any], reason: str) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        self._done.append(Subgraph(number, False, short_names(_targets(graph)), "inductor", reason))
        return compile_fx_inner(graph, inputs)

    def _take(self, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        from functorch.compile import make_boxed_func

        called = {node: short_names([node.target])[0] for node in graph.graph.nodes if node.op == "call_function"}
        number = next(self._graphs)
        reasons = {node: suited.unsupported_reason(node) for node in called if not _writes_input(node)}
        hidden = any(suited.base_name(node.target) == "as_strided" for node in reasons)
        parts = [] if hidden else _partitions(graph, reasons)
        kernels = [compile_subgraph(graph, part, f"kernel_{number}_{index}") for index, part in enumerate(parts)]
        for why in dict.fromkeys(each for each in kernels if isinstance(each, str)):
            message = f"{NAME}: supported operations were left to another backend: {why}"
            warnings.warn_explicit(message, UserWarning, __file__, 0, __name__)  # not as torch's: those may be silenced
        if not any(isinstance(each, PlacedSubgraph) for each in kernels):
            obstacles = (f"{called[node]}: {why}" for node, why in reasons.items() if why)
            failures = (each for each in kernels if isinstance(each, str))
            why = "as_strided: whose memory it reads cannot be seen" if hidden else None
            why = why or next(failures, None) or next(obstacles, "nothing to compute")
            return self._leave_all(number, graph, inputs, why)
        written = _split_off_writes(graph)
        taken = {node for part in parts for node in part}
        reasons |= {
            node: "a view, nothing to compute" for node, why in reasons.items() if not why and node not in taken
        }
        standing: dict[Node, Node] = {}
        for part, kernel in zip(parts, kernels, strict=True):
            if isinstance(kernel, str):
                reasons |= dict.fromkeys(part, kernel)
                continue
            operations = short_names([node.target for node in part])
            self._done.append(Subgraph(number, True, operations, "mlir", "", kernel.kernel.kernel.digest))
            replace_subgraph(graph, part, kernel, standing)
        legalize_graph(graph)
        graph.recompile()
        for why in dict.fromkeys(why for why in reasons.values() if why):
            left = [name for node, name in called.items() if reasons.get(node) == why]
            self._done.append(Subgraph(number, False, tuple(left), "eager", why))
        return make_boxed_func(_with_writes(graph, written))


def _partitions(graph: GraphModule, reasons: dict[Node, str | None]) -> list[list[Node]]:
    """Return connected groups of supported operations, as large as possible, each with at least one computation."""
    from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
    from torch.fx.passes.operator_support import OperatorSupportBase

    class Suited(OperatorSupportBase):
        def is_node_supported(self, submodules: Any, node: Node) -> bool:
            return node in reasons and reasons[node] is None

    partitioner = CapabilityBasedPartitioner(graph, Suited(), allows_single_node_partition=True)
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    parts = [sorted(part.nodes, key=order.__getitem__) for part in partitioner.propose_partitions()]
    parts = [_without_last_views(part) for part in parts]
    return [part for part in parts if any(suited.computes(node) for node in part)]


def _without_last_views(part: list[Node]) -> list[Node]:
    """Remove views that nothing in the part reads: outside they cost nothing, inside each would be a copy."""
    while idle := {node for node in part if suited.is_view(node) and not any(user in part for user in node.users)}:
        part = [node for node in part if node not in idle]
    return part


def _writes_input(node: Node) -> bool:
    return node.target is torch.ops.aten.copy_.default


def _split_off_writes(graph: GraphModule) -> list[int]:
    """Make the graph return the values that it would write into its inputs as additional results; return the positions
    of these inputs. The order of the graph's operations then does not matter."""
    places = {node: place for place, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    writes = [node for node in graph.graph.nodes if node.op == "call_function" and _writes_input(node)]
    (output,) = graph.graph.find_nodes(op="output")
    values = [node.args[1] for node in writes]
    written = [places[node.args[0]] for node in writes]
    for node in writes:
        node.replace_all_uses_with(node.args[0])
    output.args = ((*output.args[0], *values),)
    for node in writes:
        graph.graph.erase_node(node)
    graph.recompile()
    return written


def _with_writes(graph: GraphModule, written: Sequence[int]) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        results = graph(*inputs)
        count = len(results) - len(written)
        for place, value in zip(written, results[count:], strict=True):
            inputs[place].copy_(value)
        return results[:count]

    return run


def _targets(graph: GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


BACKEND = DynamoBackend()


def report() -> CompileReport:
    """Return the report of all compilations by `torch.compile(backend="workbench_mlir")` in this process."""
    return BACKEND.report()


def workbench_mlir(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compile a graph with the registered backend; torch's entry point group `torch_dynamo_backends` finds this
    function too.
    """
    return BACKEND(graph, inputs, **options)


if NAME not in torch._dynamo.list_backends(exclude_tags=()):
    torch._dynamo.register_backend(workbench_mlir, name=NAME)
