"""Compare backends with the einops reference in float64, for one attention variant, as far as they support it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compiled_kernels import Lane, LaneError, lane_problems
from compiled_kernels.cases import Case, Work, disagreement, suite_of
from compiled_kernels.check import device_of, moved
from compiled_kernels.masks import Both
from compiled_kernels.paged_attention import refusal
from workbench.model.own_parts import mask_of, score_of
from workbench.testing.attention_scenes import Scene, scenes
from workbench.testing.holding import held
from workbench.testing.report import Broken, Law

Change = Mapping[str, Any]


def law(lane: Lane, change: Change, examples: int) -> Law:
    """Check `backend` against the reference. A backend that refuses with a reason is not tried."""
    name = f"lane {lane}: agrees with the einops reference, and blind queries give zeros"
    if problem := lane_problems()[lane]:
        return Law(name, True, f"not tried: {problem}", tried=False)
    if change.get("module") is not None:
        told = "not tried: a module is no operator; its model is held to the oracle above"
        return Law(name, True, told, tried=False)
    attention = Scene(0, 1, 2, 4, (2,), 1, 1).spec(change).layers[0].attention
    if problem := refusal(lane, mask_of(attention), score_of(attention)):
        return Law(name, True, f"not claimed: {problem}", tried=False)
    return held(name, functools.partial(_agrees, lane, change), examples, scenes(90, alike=lane is Lane.INDUCTOR))


@dataclass(frozen=True)
class _EveryOther:
    """A mask under which odd queries see nothing."""

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return (query % 2 == 0) & (key >= 0)


def _agrees(lane: Lane, change: Change, scene: Scene) -> None:
    attention = scene.spec(change).layers[0].attention
    suite = suite_of("paged_attention")
    decodes = len(scene.lengths) - 1
    spans = [1 if i < decodes else 1 + (scene.seed + i) % length for i, length in enumerate(scene.lengths)]
    arguments = {
        "contexts": scene.lengths, "spans": spans, "groups": attention.groups, "share": attention.share,
        "dim": attention.dim, "size": scene.page_size, "dtype": torch.float32,
        "softcap": attention.softcap, "sinks": attention.sink_logits,
    }  # fmt: skip
    score = score_of(attention)
    for mask in (mask_of(attention), Both(mask_of(attention), _EveryOther())):
        if refusal(lane, mask, score):
            continue
        generator = torch.Generator().manual_seed(scene.seed)
        *inputs, _ = suite.inputs(generator, **arguments, mask=mask)
        inputs = moved((*inputs, score), device_of(lane))
        try:
            wrong = disagreement(suite, Case("drawn", arguments, Work(0, 0)), inputs, lane)
        except LaneError as error:
            wrong = f"raised {error}"
        if wrong:
            raise Broken(f"{wrong}, on {scene}, queries of {', '.join(map(str, spans))} tokens")
        _blind_rows_are_zero(suite.call(*inputs, lane=lane), inputs, scene)


def _blind_rows_are_zero(out: Tensor, inputs: tuple, scene: Scene) -> None:
    starts, lengths, mask = inputs[4].tolist(), inputs[5].tolist(), inputs[7]
    for seq, context in enumerate(lengths):
        rows = out[starts[seq] : starts[seq + 1]]
        at = torch.arange(context - len(rows), context, device=out.device)
        blind = ~mask(at[:, None], torch.arange(context, device=out.device)[None]).any(-1)
        if bool(rows.isnan().any()) or bool(rows[blind].any()):
            raise Broken(f"a query that sees nothing gives no zeros, on {scene}")
