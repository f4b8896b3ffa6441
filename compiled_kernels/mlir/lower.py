"""Lower a torch function, for the shapes it is called with, through every level of MLIR."""

# The type stubs of these optional packages do not list their exports.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.mlir import pipeline
from compiled_kernels.tracing import TRACING


def lower(function: Callable[..., Any], examples: Iterable[Tensor], name: str, lanes: int = 0) -> dict[str, str]:
    """Lower a function and return the text of each stage, in order: `torch` (dialect), `linalg` (fused, on tensors),
    `transformed` (where a schedule ran) and `bufferized`, which `compile_text` takes.

    Args:
        function: the function; it returns a tensor or a tuple of tensors and mutates nothing. Its results become
            arguments after the inputs.
        examples: tensors of the shapes and types to lower for.
        name: the function's name in the module.
        lanes: length of vectors: if it is above 0, operations whose shapes are multiples of it are vectorized (see
            schedule.py).
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch_mlir.extras.fx_decomp_util import get_decomposition_table

    with TRACING, torch.no_grad():
        table: dict[Any, Callable[..., Any]] = dict(get_decomposition_table())
        trace = make_fx(function, decomposition_table=table, tracing_mode="fake")
        graph = trace(*examples).graph
    return lower_graph(graph, name, lanes)


def lower_graph(graph: torch.fx.Graph, name: str, lanes: int = 0) -> dict[str, str]:
    """Lower a graph of core operations with static tensor shapes, as `lower` does. Raises BackendError for an operation
    that torch-mlir does not support."""
    from torch_mlir.dialects import torch as torch_dialect
    from torch_mlir.extras.fx_importer import FxImporter
    from torch_mlir.ir import Context

    from compiled_kernels.mlir import rewrites, schedule

    context = Context()
    torch_dialect.register_dialect(context)
    importer = FxImporter(context=context)
    try:
        importer.import_stateless_graph(graph, func_name=name)
    except (NotImplementedError, ValueError, TypeError, KeyError) as error:
        raise BackendError(
            f"mlir: torch-mlir does not import this graph: {' '.join(str(error).split())[:300]}"
        ) from None
    module = importer.module
    stages = {"torch": str(module)}
    pipeline.run_pipeline(module, pipeline.TO_LINALG)
    pipeline.run_pipeline(module, pipeline.NAMELESS)
    rewrites.duplicate_cheap(module)
    pipeline.run_pipeline(module, "func.func(linalg-fuse-elementwise-ops,canonicalize)")
    rewrites.duplicate_cheap(module)
    pipeline.run_pipeline(module, pipeline.FUSE)
    stages["linalg"] = str(module)
    schedule.decompose_concat(module)
    rewrites.results_as_arguments(module)
    pipeline.run_pipeline(module, pipeline.SIMPLER_MATH)
    rewrites.allow_reordering(module)
    rewrites.expand_exp(module)
    rewrites.bfloat16_by_float32(module)
    scheduled = schedule.tile_by_rows(module, alone=lanes > 0)
    if lanes and schedule.vectorize(module, lanes):
        scheduled = True
    if scheduled:
        stages["transformed"] = str(module)
    pipeline.run_pipeline(module, pipeline.BUFFERIZE)
    rewrites.loops_for_copies(module)
    rewrites.mark_arguments_noalias(module)
    return {**stages, "bufferized": str(module)}


def sources() -> str:
    """Return the source text of the code that lowers functions; it is part of the cache key of compiled code."""
    here = Path(__file__).parent
    return "".join((here / f"{name}.py").read_text() for name in ("lower", "pipeline", "rewrites", "schedule"))
