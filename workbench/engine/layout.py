"""How the weights of a model's blocks lie in memory: row by row, or in panels, which the lane mlir reads at decode and
prefill alike (see compiled_kernels/blocked/layout.py)."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

import compiled_kernels
from compiled_kernels import Lane
from compiled_kernels.blocked import refusal, to_panels
from compiled_kernels.remembered import Remembered, directory, machine
from workbench.cache.shapes import CacheShape
from workbench.engine.lanes import Lanes
from workbench.engine.mlir_step import step_problem, store_problem
from workbench.model.parts import Linear
from workbench.model.transformer import Transformer

FILE = "layouts.json"
TOKENS = 512  # of the product that is timed
ROUNDS = 7


def lay_out(
    model: Transformer, lanes: Lanes, shapes: Iterable[CacheShape], auto: bool, kept: Remembered | None = None
) -> Lanes:
    """Lays the model's blocks out in panels where the lane mlir decodes it and can prefill it from them, and gives the
    lanes that run it then.

    Under `auto` only where the product from panels takes less time than torch's: on a processor with instructions for
    whole matrices (AMX) torch's is several times as quick, and prefill stays with it.
    """
    if lanes.decode is not Lane.MLIR or _problem(model, shapes):
        return lanes
    why = ""
    if auto:
        ours, torchs = _seconds(model, kept or Remembered(directory() / FILE))
        why = f"a product of {TOKENS} tokens takes {1000 * ours:.2f} ms from panels, {1000 * torchs:.2f} by torch"
        if ours > torchs:
            return replace(lanes, reason=f"{lanes.reason}; weights row by row: {why}")
        why = f"; weights in panels: {why}"
    model.lay_out()
    model.run_on(Lane.MLIR)
    return replace(lanes, blocks=Lane.MLIR, reads=Lane.MLIR, reason=f"{lanes.reason}{why}")


def _problem(model: Transformer, shapes: Iterable[CacheShape]) -> str | None:
    """Why the lane mlir does not prefill `model` from panels; None where it does."""
    for part in model.blocks.modules():
        if isinstance(part, Linear):
            if part.format == "int4":
                return "INT4 weights are not laid out in panels"
            if problem := refusal(part.weight):
                return problem
    return step_problem(model.spec) or store_problem(shapes)


def _seconds(model: Transformer, kept: Remembered) -> tuple[float, float]:
    """What the largest product of the blocks takes with `TOKENS` rows: from panels, and by torch. Measured once."""
    linears = [part for part in model.blocks.modules() if isinstance(part, Linear)]
    largest = max(linears, key=lambda part: part.weight.numel())
    out, width = largest.weight.shape
    what = [machine(), torch.get_num_threads(), out, width, str(largest.weight.dtype), str(model.dtype)]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    if (found := _sound(kept.load().get(key))) is None:
        found = _timed(out, width, largest.format, model.dtype)
        kept.add(key, {"panels": found[0], "torch": found[1]})
    return found


@torch.inference_mode()
def _timed(out: int, width: int, format: str, dtype: torch.dtype) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, width, generator=generator).to(dtype) for rows in (TOKENS, out))
    if format == "int8":
        values, scales = torch.zeros(out, width, dtype=torch.int8), torch.ones(out)
        panels = to_panels(values)
        ours = lambda: compiled_kernels.linear_int8(x, panels, scales, None, Lane.MLIR)  # noqa: E731
    else:
        panels = to_panels(weight)
        ours = lambda: compiled_kernels.linear(x, panels, None, Lane.MLIR)  # noqa: E731
    runs, seconds = (ours, lambda: F.linear(x, weight)), ([], [])
    for round in range(ROUNDS + 1):
        for run, times in zip(runs, seconds, strict=True):
            began = time.perf_counter()
            run()
            if round:  # the first compiles
                times.append(time.perf_counter() - began)
    ours_median, torchs_median = (statistics.median(times) for times in seconds)
    return ours_median, torchs_median


def _sound(found: Any) -> tuple[float, float] | None:
    """A remembered entry that can be used; a damaged one is as if it had never been."""
    try:
        seconds = float(found["panels"]), float(found["torch"])
    except (KeyError, TypeError, ValueError):
        return None
    return seconds if all(0 < each < float("inf") for each in seconds) else None
