"""Choose the layout of block weights: row by row, or in panels, which the backend mlir reads in decode and prefill (see
compiled_kernels/blocked/layout.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import compiled_kernels
from compiled_kernels import Backend, BackendError
from compiled_kernels.blocked import to_panels
from compiled_kernels.result_cache import ResultCache, machine_key
from compiled_kernels.rounds import time_in_rounds
from workbench.executors.autotune import trial_key, tried_of
from workbench.executors.build import build_step_runner
from workbench.executors.programs.prefill import pairs_problem, weights_in_panels
from workbench.executors.reference import (
    CLEARLY_FASTER_RATIO,
    CacheLayout,
    reference_logits,
    single_decode_step,
)
from workbench.executors.select import Backends
from workbench.files import cache_directory
from workbench.model.linear import Linear
from workbench.model.transformer import Transformer
from workbench.scheduler.plan import Span, StepPlan
from workbench.units import format_seconds

LAYOUT_FILE = "layouts.json"
PRODUCT_TOKENS = 512  # rows of the timed product
CONTEXT_TOKENS, PREFILL_TOKENS = (
    96,
    64,
)  # context tokens of the checked decode, and tokens of the checked prefill


class PanelTrial(NamedTuple):
    """The seconds of a product of `PRODUCT_TOKENS` rows, with the weight in panels and with torch, and the reason
    against panels if there is one.
    """

    panels: float
    torch: float
    problem: str = ""

    def __str__(self) -> str:
        ours, torchs = map(format_seconds, (self.panels, self.torch))
        message = f"a product of {PRODUCT_TOKENS} tokens takes {ours} from panels, {torchs} by torch"
        return f"{message}; {self.problem}" if self.problem else message


def choose_weight_layout(
    model: Transformer,
    backends: Backends,
    layout: CacheLayout,
    auto: bool,
    remembered: ResultCache | None = None,
    in_place: bool = False,
) -> Backends:
    """Convert the block weights to panels if the backend mlir decodes and can prefill from panels; return the new
    backends.

    The experts of a mixture and all quantized matrices are in panels whenever mlir decodes. Under `auto`, other weights
    stay row by row if torch's product is clearly faster (AMX), if mlir was refused for attention, or if the error of
    the logits exceeds the bound for arithmetic in this precision. The decision is remembered. Quantized matrices are
    laid out `in_place` if no other model reads them.
    """
    if backends.decode is not Backend.MLIR:
        return backends
    if model.use_code_panels(in_place=in_place) and not backends.decodes_by_blocks:
        model.set_backend(Backend.MLIR)  # only mlir's operators read such panels
        backends = replace(backends, blocks=Backend.MLIR, checked=True)
    if backends.decodes_by_blocks or panels_refusal(model) or weights_in_panels(model):
        return backends
    in_panels = replace(backends, blocks=Backend.MLIR, attention=Backend.MLIR, checked=True)
    if not auto:
        _take(model, True, Backend.MLIR)
        return in_panels
    if backends.attention is not Backend.MLIR:
        return backends
    remembered, key = remembered or ResultCache(cache_directory() / LAYOUT_FILE), trial_key(model, layout)
    found = _sound(remembered.load().get(key))
    if found is None:
        found, quiet = _tried(model, in_panels, layout, backends.blocks)
        if quiet:
            remembered.add(key, {**found._asdict(), **tried_of(model, layout)})
    if found.problem:
        return replace(backends, reason=f"{backends.reason}; weights row by row: {found}")
    _take(model, True, Backend.MLIR)
    return replace(in_panels, reason=f"{backends.reason}; then weights were laid out in panels: {found}")


def panels_refusal(model: Transformer) -> str | None:
    """Return the reason why the block weights of `model` cannot be stored in panels; None if they can."""
    for part in model.blocks.modules():
        if isinstance(part, Linear) and (problem := part.panels_refusal):
            return problem
    return pairs_problem(model)


def _take(model: Transformer, panels: bool, backend: Backend) -> None:
    model.use_panels(panels)
    model.set_backend(backend)


def _tried(model: Transformer, backends: Backends, held: CacheLayout, blocks: Backend) -> tuple[PanelTrial, bool]:
    """Time the largest product, then check a decode and a prefill from panels; return the result and whether to
    remember it.

    Afterwards the weights are row by row again, on backend `blocks`.
    """
    linears = [part for part in model.blocks.modules() if isinstance(part, Linear) and part.format.is_dense]
    largest = max(linears, key=lambda part: part.weight.numel())
    try:
        ours, torchs, quiet = _seconds(largest, model.dtype)
    except BackendError as error:
        return PanelTrial(math.inf, math.inf, str(error)), False
    if torchs < CLEARLY_FASTER_RATIO * ours:
        return PanelTrial(ours, torchs, "torch's is clearly quicker"), quiet
    _take(model, True, Backend.MLIR)
    try:
        problem = _wrong(model, backends, held)
    finally:
        _take(model, False, blocks)
        model.use_code_panels()
    return PanelTrial(ours, torchs, problem), quiet


@torch.inference_mode()
def _seconds(linear: Linear, dtype: torch.dtype) -> tuple[float, float, bool]:
    """Time the product with `PRODUCT_TOKENS` rows from panels and by torch; return the times and whether the rounds
    agreed.
    """
    out, width = linear.out_features, linear.in_features
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, width, generator=generator).to(dtype) for rows in (PRODUCT_TOKENS, out))
    panels = to_panels(weight)
    ours = lambda: compiled_kernels.linear(x, panels, None, Backend.MLIR)  # noqa: E731 (a pair to time)
    torchs = lambda: F.linear(x, weight)  # noqa: E731 (a pair to time)
    found = time_in_rounds({Backend.MLIR: ours, Backend.EAGER: torchs})
    return found.seconds[Backend.MLIR], found.seconds[Backend.EAGER], found.is_stable


@torch.inference_mode()
def _wrong(model: Transformer, backends: Backends, held: CacheLayout) -> str:
    """Return how far logits of a decode or prefill exceed the allowed error; an empty string if they are right."""
    (store, decode), (own, _) = (single_decode_step(model, held, CONTEXT_TOKENS) for _ in range(2))
    sequence = decode.spans[0].sequence
    length = min(PREFILL_TOKENS, sequence.num_computed_tokens)
    prefill = StepPlan(0, (Span(sequence, 0, length, True),))
    runner = build_step_runner(model, own, backends)
    for name, plan in (("decode", decode), ("prefill", prefill)):
        exact, bound = reference_logits(model, store, plan)
        away = (runner.compute(name, plan).double() - exact).abs().max().item()
        if not away <= bound:
            return f"logits of a {name} are {away:.2g} away from exact ones, {bound:.2g} is allowed"
    return ""


def remembered_layouts() -> list[dict[str, Any]]:
    """Return all remembered layout choices, newest last: `chosen` is panels or rows, with its `reason`; `valid` tells
    whether machine, versions and code are unchanged since then. Damaged entries are left out.
    """
    named, choices = ("model", "weights", "cache", "threads", "cpu", "here", "date"), []
    for entry in ResultCache(cache_directory() / LAYOUT_FILE).load().values():
        found = _sound(entry)
        if found is None or not all(name in entry for name in named):
            continue
        chosen = {"chosen": "rows" if found.problem else "panels", "reason": str(found)}
        choices.append({**{name: entry[name] for name in named}, **chosen, "valid": entry["here"] == machine_key()})
    return choices


def _sound(found: Any) -> PanelTrial | None:
    """Parse a remembered entry; None if it is damaged."""
    try:
        read = PanelTrial(float(found["panels"]), float(found["torch"]), str(found["problem"]))
    except (KeyError, TypeError, ValueError):
        return None
    return read if all(0 < each < float("inf") for each in read[:2]) else None
