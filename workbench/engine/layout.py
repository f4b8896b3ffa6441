"""Choose the layout of block weights: row by row, or in panels, which the backend mlir reads at decode and prefill
alike (see compiled_kernels/blocked/layout.py)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import compiled_kernels
from compiled_kernels import Lane, LaneError
from compiled_kernels.blocked import refusal, to_panels
from compiled_kernels.remembered import Remembered, directory, machine
from workbench.cache.shapes import CacheShape
from workbench.engine.exact import Held, decode_of_one, expected
from workbench.engine.executors import MlirExecutor, executor_for
from workbench.engine.lanes import Lanes
from workbench.engine.mlir_step import step_problem, store_problem
from workbench.engine.plan import Span, StepPlan
from workbench.engine.rounds import CLEARLY, timed
from workbench.engine.trial import tried_of
from workbench.model.parts import Linear
from workbench.model.transformer import Transformer

FILE = "layouts.json"
TOKENS = 512  # of the product that is timed
CONTEXT, PREFILL = 96, 64  # tokens before the one that is decoded for a check, and of the prefill that is checked


class Found(NamedTuple):
    """Seconds of a product of `PRODUCT_TOKENS` rows from panels and by torch, and why panels are not taken, if so."""

    panels: float
    torch: float
    problem: str = ""

    def __str__(self) -> str:
        ours, torchs = (f"{1000 * seconds:.2f}" for seconds in (self.panels, self.torch))
        told = f"a product of {TOKENS} tokens takes {ours} ms from panels, {torchs} by torch"
        return f"{told}; {self.problem}" if self.problem else told


def lay_out(model: Transformer, lanes: Lanes, held: Held, auto: bool, kept: Remembered | None = None) -> Lanes:
    """Convert the block weights to panels if the backend mlir decodes and can prefill from them; return the backends
    then.

    Under `auto` it is not done where torch's product is clearly faster (AMX), where the backend mlir was refused for
    attention, or where results are further from exact logits than arithmetic in this precision is. The decision is
    remembered.
    """
    if lanes.decode is not Lane.MLIR or layout_problem(model, held.shapes):
        return lanes
    in_panels = replace(lanes, blocks=Lane.MLIR, reads=Lane.MLIR, vetted=True)
    if not auto:
        _take(model, True, Lane.MLIR)
        return in_panels
    if lanes.reads is not Lane.MLIR:
        return lanes
    kept, key = kept or Remembered(directory() / FILE), _key(model, held)
    found = _sound(kept.load().get(key))
    if found is None:
        found, quiet = _tried(model, in_panels, held, lanes.blocks)
        if quiet:
            kept.add(key, {**found._asdict(), **tried_of(model, held)})
    if found.problem:
        return replace(lanes, reason=f"{lanes.reason}; weights row by row: {found}")
    _take(model, True, Lane.MLIR)
    return replace(in_panels, reason=f"{lanes.reason}; then weights were laid out in panels: {found}")


def layout_problem(model: Transformer, shapes: Iterable[CacheShape]) -> str | None:
    """Return why the backend mlir does not prefill `model` from panels; None if it does."""
    for part in model.blocks.modules():
        if isinstance(part, Linear):
            if part.format == "int4":
                return "INT4 weights are not laid out in panels"
            if problem := refusal(part.weight):
                return problem
    return step_problem(model.spec) or store_problem(shapes)


def _take(model: Transformer, panels: bool, lane: Lane) -> None:
    model.lay_out(panels)
    model.run_on(lane)


def _key(model: Transformer, held: Held) -> str:
    what = {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "model": model.spec.model_dump(mode="json"),
        "weights": [*model.format.named, str(model.dtype)],
        "cache": [held.page_size, str(held.dtype), [repr(shape) for shape in held.shapes]],
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _tried(model: Transformer, lanes: Lanes, held: Held, blocks: Lane) -> tuple[Found, bool]:
    """Time the largest product, then check a decode and a prefill from panels; return the result and whether to
    remember it.

    The model is row by row again afterwards, on `blocks`.
    """
    linears = [part for part in model.blocks.modules() if isinstance(part, Linear)]
    largest = max(linears, key=lambda part: part.weight.numel())
    try:
        ours, torchs, quiet = _seconds(largest, model.dtype)
    except LaneError as error:
        return Found(math.inf, math.inf, str(error)), False
    if torchs < CLEARLY * ours:
        return Found(ours, torchs, "torch's is clearly quicker"), quiet
    _take(model, True, Lane.MLIR)
    try:
        problem = _wrong(model, lanes, held)
    finally:
        _take(model, False, blocks)
    return Found(ours, torchs, problem), quiet


@torch.inference_mode()
def _seconds(linear: Linear, dtype: torch.dtype) -> tuple[float, float, bool]:
    """Time the product with `PRODUCT_TOKENS` rows from panels and by torch; return whether the rounds agreed, too."""
    out, width = linear.weight.shape
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, width, generator=generator).to(dtype) for rows in (TOKENS, out))
    if linear.format == "int8":
        values, scales = torch.zeros(out, width, dtype=torch.int8), torch.ones(out)
        panels = to_panels(values)
        ours = lambda: linear.product(x, panels, scales, None, Lane.MLIR)  # noqa: E731
        torchs = lambda: linear.product(x, values, scales, None, Lane.EAGER)  # noqa: E731
    else:
        panels = to_panels(weight)
        ours = lambda: compiled_kernels.linear(x, panels, None, Lane.MLIR)  # noqa: E731
        torchs = lambda: F.linear(x, weight)  # noqa: E731
    found = timed({Lane.MLIR: ours, Lane.EAGER: torchs})
    return found.seconds[Lane.MLIR], found.seconds[Lane.EAGER], found.quiet


@torch.inference_mode()
def _wrong(model: Transformer, lanes: Lanes, held: Held) -> str:
    """Return how far logits of a decode or prefill exceed the allowed error; an empty string if they are right."""
    (store, decode), (own, _) = (decode_of_one(model, held, CONTEXT) for _ in range(2))
    sequence = decode.spans[0].sequence
    length = min(PREFILL, sequence.computed)
    prefill = StepPlan(0, (Span(sequence, 0, length, True),))
    executor = executor_for(model, own, lanes)
    assert isinstance(executor, MlirExecutor)
    for name, plan, run in (("decode", decode, executor.forward), ("prefill", prefill, executor.rest.forward)):
        exact, bound = expected(model, store, plan)
        away = (run(plan).double() - exact).abs().max().item()
        if not away <= bound:
            return f"logits of a {name} are {away:.2g} away from exact ones, {bound:.2g} is allowed"
    return ""


def remembered_layouts(kept: Remembered | None = None) -> list[dict[str, Any]]:
    """Return every choice of a layout that is remembered, newest last: `chosen` is panels or rows, `reason` says why;
    `valid` says whether machine, versions and code are still those it was made with. Damaged entries are left out."""
    named, choices = ("model", "weights", "cache", "threads", "cpu", "here", "date"), []
    for entry in (kept or Remembered(directory() / FILE)).load().values():
        found = _sound(entry)
        if found is None or not all(name in entry for name in named):
            continue
        chosen = {"chosen": "rows" if found.problem else "panels", "reason": str(found)}
        choices.append({**{name: entry[name] for name in named}, **chosen, "valid": entry["here"] == machine()})
    return choices


def _sound(found: Any) -> Found | None:
    """Parse a remembered entry; None if it is damaged."""
    try:
        read = Found(float(found["panels"]), float(found["torch"]), str(found["problem"]))
    except (KeyError, TypeError, ValueError):
        return None
    return read if all(0 < each < float("inf") for each in read[:2]) else None
