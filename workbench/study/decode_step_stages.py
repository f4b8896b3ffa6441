"""Compilation stages of a model's whole decode step, as the mlir backend runs it."""

from __future__ import annotations

from pathlib import Path

import torch

from compiled_kernels import Lane, LaneError, lane_problems
from compiled_kernels.stages import Stage, Stages
from workbench.engine.buckets import bucket_for
from workbench.engine.load import SHAPE, SHIPPED, parse_dtype, stored_dtype
from workbench.model.families import read_spec
from workbench.model.quantized import WeightFormat
from workbench.model.shapes import named_shape
from workbench.model.transformer import Transformer


def decode_step_stages(
    model: str, dtype: str = "auto", weights: WeightFormat | None = None, rows: int = 1, page_size: int = 64
) -> Stages:
    """Return the compilation stages of the step that decodes `rows` sequences, on torch's present threads.

    `rows` is rounded up to its bucket (1, 2, 4, ...). The step is compiled where it is not cached, without any weights.
    Raises LaneError where the mlir backend does not work here."""
    if problem := lane_problems()[Lane.MLIR]:
        raise LaneError(f"lane mlir does not work here: {problem}")
    from compiled_kernels.decode_step.step import library, step_text
    from compiled_kernels.mlir import compile_text
    from workbench.engine.layout import layout_problem
    from workbench.engine.mlir_step import step_shape

    if model.startswith(SHAPE):
        spec, stored = named_shape(model.removeprefix(SHAPE)), torch.bfloat16
    else:
        folder = SHIPPED.get(model, Path(model))
        spec, stored = read_spec(folder), stored_dtype(folder / "config.json")
    format = weights or WeightFormat()
    format.check(spec)
    with torch.device("meta"):
        shapes = Transformer(spec, format=format).to(stored if dtype == "auto" else parse_dtype(dtype))
    if layout_problem(shapes, shapes.cache_shapes()) is None:
        shapes.lay_out()  # as the mlir backend does; `auto` leaves weights row by row where torch's product is quicker
    shape = step_shape(shapes, page_size, bucket_for(rows))
    kernel = compile_text(step_text(shape), "decode_step", level=shape.target.level, libraries=(library(),))
    texts = {name: Stage(text) for name, text in kernel.stages.items()}
    return Stages(kernel.digest, "the entry in the cache of artifacts that runs", texts)
