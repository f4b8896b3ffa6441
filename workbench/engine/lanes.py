"""From a lane's name to what carries out a model here: one lane for decode steps, one for everything else."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from compiled_kernels import Lane, LaneError, lane_problems
from compiled_kernels.choice import best_lane
from compiled_kernels.lanes import AUTO
from compiled_kernels.masks import Causal, SlidingWindow
from workbench.errors import WorkbenchError, nearest
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec

DECODE_CONTEXT = 512  # tokens of context at which decode attention is compared

Operation = tuple[str, tuple[tuple[str, Any], ...]]  # an operator, and the arguments of its cases


@dataclass(frozen=True)
class Lanes:
    """`decode` carries out steps in which every sequence computes one token, `blocks` all other steps."""

    decode: Lane
    blocks: Lane
    reason: str

    def __str__(self) -> str:
        return str(self.decode) if self.decode is self.blocks else f"{self.decode} (prefill: {self.blocks})"


def resolve_lanes(name: str) -> Lanes:
    """What `name` means on this machine, and why: `auto`, or a lane, which is taken at its word.

    Where several lanes could decode, `auto` names the one that as a rule is fastest; `measured` compares them for
    one model. Raises WorkbenchError for a lane that is unknown or does not work here.
    """
    problems = lane_problems()
    if name == AUTO:
        blocks = Lane.EAGER if problems[Lane.INDUCTOR] else Lane.INDUCTOR
        reason = f"auto: inductor does not work here: {problems[Lane.INDUCTOR]}" if problems[Lane.INDUCTOR] else AUTO
        return Lanes(blocks if problems[Lane.MLIR] else Lane.MLIR, blocks, reason)
    if name not in tuple(Lane):
        known = (AUTO, *Lane)
        raise WorkbenchError(f"unknown lane {name!r}{nearest(name, known)}; known here: {', '.join(known)}")
    if problem := problems[Lane(name)]:
        raise WorkbenchError(f"lane {name!r} does not work here: {problem}")
    return Lanes(Lane(name), Lane(name), "asked for")


def measured(lanes: Lanes, spec: ModelSpec, format: WeightFormat, dtype: torch.dtype, page_size: int) -> Lanes:
    """`lanes` of `auto`, with the decode lane that is fastest for this model's products and attention here.

    Each is measured once on this machine and remembered; a lane whose results are wrong here is not chosen.
    """
    if lanes.decode is lanes.blocks:
        return lanes  # there is nothing to choose between
    if dtype not in (torch.float32, torch.bfloat16):
        return replace(lanes, decode=lanes.blocks, reason=f"auto: lane mlir does not decode in {dtype}")
    candidates = (Lane.MLIR, lanes.blocks)
    seconds = dict.fromkeys(candidates, 0.0)
    try:
        for (operator, arguments), count in decode_operations(spec, format, dtype, page_size).items():
            found = best_lane(operator, dict(arguments), candidates).seconds
            for lane in candidates:
                seconds[lane] += count * found.get(lane, torch.inf)
    except LaneError as error:
        return replace(lanes, decode=lanes.blocks, reason=f"auto: {error}")
    told = ", ".join(f"{lane} {1000 * seconds[lane]:.2f} ms" for lane in sorted(candidates, key=seconds.__getitem__))
    reason = f"auto: products and attention of a decode step take {told}, measured on this machine"
    return Lanes(min(candidates, key=seconds.__getitem__), lanes.blocks, reason)


def decode_operations(spec: ModelSpec, format: WeightFormat, dtype: torch.dtype, page_size: int) -> Counter[Operation]:
    """The products and the attention of one decode step, and how often each occurs in it."""
    found: Counter[Operation] = Counter()
    for kind in spec.layers:
        a = kind.attention
        for width, out, bias in (
            (spec.width, (a.heads + 2 * a.groups) * a.dim, a.input_bias),
            (a.heads * a.dim, spec.width, a.output_bias),
            (spec.width, 2 * kind.hidden, kind.feedforward_bias),
            (kind.hidden, spec.width, kind.feedforward_bias),
        ):
            found[_product(width, out, bias, dtype, format.blocks, format.group)] += 1
        shape = {"groups": a.groups, "share": a.share, "dim": a.dim, "size": page_size, "dtype": dtype}
        mask = Causal() if a.window is None else SlidingWindow(a.window)
        found[_frozen("paged_attention", contexts=(DECODE_CONTEXT,), spans=(1,), mask=mask, **shape)] += 1
    found[_product(spec.width, spec.vocab, False, dtype, format.head, format.group)] += 1
    return found


def _product(width: int, out: int, bias: bool, dtype: torch.dtype, format: str, group: int) -> Operation:
    name = "linear" if format == "dense" else f"linear_{format}"
    more = {"group": group} if format == "int4" else {}
    return _frozen(name, tokens=1, width=width, out=out, dtype=dtype, bias=bias, **more)


def _frozen(operator: str, **arguments: Any) -> Operation:
    return operator, tuple(arguments.items())
