"""Compilation stages of a model's whole decode step, as the mlir backend runs it."""

from __future__ import annotations

from pathlib import Path

import torch

from compiled_kernels import Backend, BackendError, backend_problems
from compiled_kernels.stages import CompilerStage, CompilerStages
from workbench.engine.buckets import bucket_for
from workbench.engine.load import SHAPE_PREFIX, BUNDLED_MODELS, parse_dtype, stored_dtype
from workbench.model.families import read_spec
from workbench.model.quantized import WeightFormat
from workbench.model.shapes import named_shape
from workbench.model.transformer import Transformer


def decode_step_stages(
    model: str, dtype: str = "auto", weights: WeightFormat | None = None, rows: int = 1, page_size: int = 64
) -> CompilerStages:
    """Return the compilation stages of the step that decodes `rows` sequences, on torch's present threads.

    `rows` is rounded up to its bucket (1, 2, 4, ...). The step is compiled where it is not cached, without any weights.
    Raises BackendError where the mlir backend does not work here."""
    if problem := backend_problems()[Backend.MLIR]:
        raise BackendError(f"backend mlir does not work here: {problem}")
    from compiled_kernels.decode_step.step import libgomp_path, step_text
    from compiled_kernels.mlir import compile_text
    from workbench.engine.layout import unsupported_layout_reason
    from workbench.engine.mlir_step import step_shape

    if model.startswith(SHAPE_PREFIX):
        spec, stored = named_shape(model.removeprefix(SHAPE_PREFIX)), torch.bfloat16
    else:
        folder = BUNDLED_MODELS.get(model, Path(model))
        spec, stored = read_spec(folder), stored_dtype(folder / "config.json")
    format = weights or WeightFormat()
    format.check(spec)
    with torch.device("meta"):
        shapes = Transformer(spec, format=format).to(stored if dtype == "auto" else parse_dtype(dtype))
    if unsupported_layout_reason(shapes, shapes.cache_shapes()) is None:
        shapes.use_panels()  # as the mlir backend does; `auto` leaves weights row by row where torch's product is quicker
    shape = step_shape(shapes, page_size, bucket_for(rows))
    kernel = compile_text(step_text(shape), "decode_step", level=shape.target.level, libraries=(libgomp_path(),))
    texts = {name: CompilerStage(text) for name, text in kernel.stages.items()}
    return CompilerStages(kernel.digest, "the entry in the cache of artifacts that runs", texts)
