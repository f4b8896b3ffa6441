"""Run two models on the same text, and compare every tensor that both compute, so that a difference shows where it
arises.

Hooks record the inputs and outputs of transformers' modules. Then our model runs: each of its tensors is compared with
the recorded one and replaced by it, so that differences do not propagate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from einops import rearrange
from torch import Tensor, nn

from workbench.check.places import Place, mixture_name
from workbench.model.checkpoint_names import CheckpointNames
from workbench.model.feedforward import MixtureOfExperts
from workbench.model.transformer import Transformer

LOCAL_BOUND = 2e-5  # share of a row's largest number: one module in float32, with equal input
ANGLE_BOUND = 1e-4  # for cosines and sines, which they may compute in float32
ROWS_AT_ONCE = 256  # rows compared at once


@dataclass(frozen=True)
class PlaceDifference:
    """A difference between the models at a place: `position` is the first token that differs, `column` the column with
    the largest difference there, and `size` that difference relative to the row's largest value."""

    place: Place
    position: int
    column: int
    size: float

    def as_json(self) -> dict[str, Any]:
        place = self.place
        found = {"layer": place.layer, "module": place.module, "position": self.position, "column": self.column}
        return found | {"difference": self.size, "ours": place.ours, "theirs": list(place.theirs)}


class PlaceTensors(dict[tuple[str, str], Tensor]):
    """Tensors that transformers' model computed, by module and side (input or output). `angles` are outputs of rotary
    modules; `chosen` are the experts and weights that a mixture's module received."""

    def __init__(self) -> None:
        super().__init__()
        self.angles: list[tuple[Tensor, Tensor]] = []
        self.chosen: dict[int, tuple[Tensor, Tensor]] = {}

    def expected(self, place: Place, tokens: int) -> Tensor | None:
        """Return transformers' tensor of a place in the layout of our tensor; None if its shape does not fit."""
        parts = [self.get((name, place.side)) for name in place.theirs]
        if any(part is None for part in parts):
            return None
        rows = [_rows(cast(Tensor, part), tokens, place.heads) for part in parts]
        if any(part is None for part in rows):
            return None
        whole = torch.cat(cast("list[Tensor]", rows), dim=-1)
        return whole if place.columns is None else whole[..., list(place.columns)]


def _rows(tensor: Tensor, tokens: int, heads: int) -> Tensor | None:
    """Return [token, column], or [token, head, column] for tensors cut into heads."""
    if not heads:
        return tensor.reshape(tokens, -1) if tensor.numel() == tokens * tensor.shape[-1] else None
    tensor = tensor.squeeze(0)
    if tensor.ndim == 2 and len(tensor) == tokens:
        return rearrange(tensor, "token (head dim) -> token head dim", head=heads)
    if tensor.ndim == 3 and tensor.shape[:2] == (heads, tokens):
        tensor = rearrange(tensor, "head token dim -> token head dim")
    return tensor if tensor.ndim == 3 and tensor.shape[:2] == (tokens, heads) else None


@torch.no_grad()
def record_places(
    theirs: Any, ids: Tensor, places: Sequence[Place], names: CheckpointNames
) -> tuple[PlaceTensors, Tensor]:
    """Run transformers' model; return its tensors of the places, and its logits [token, vocab]."""
    values, modules = PlaceTensors(), dict(theirs.named_modules())
    wanted = {(name, place.side) for place in places for name in place.theirs}
    with ExitStack() as hooks:
        for name in {name for name, _ in wanted}:

            def keep(module: Any, given: Any, keywords: Any, out: Any, name: str = name) -> None:
                for side, tensor in (("in", _first_tensor((given, keywords))), ("out", _first_tensor(out))):
                    if tensor is not None and (name, side) in wanted:
                        values[name, side] = tensor.detach().clone()

            hooks.callback(modules[name].register_forward_hook(keep, with_kwargs=True).remove)
        for module in modules.values():
            if type(module).__name__.endswith("RotaryEmbedding"):
                hooks.callback(module.register_forward_hook(lambda *given: _keep_angles(values, given[-1])).remove)
        for place in places:
            if place.layer is not None and (name := mixture_name(names, place.layer, set(modules))) is not None:

                def choose(module: Any, given: Any, layer: int = place.layer) -> None:
                    whole = [each for each in given[1:] if isinstance(each, Tensor) and each.ndim == 2]
                    indices = [each for each in whole if not each.is_floating_point()]
                    weights = [each for each in whole if each.is_floating_point()]
                    if len(indices) == len(weights) == 1 and indices[0].shape == weights[0].shape:
                        values.chosen[layer] = indices[0].clone(), weights[0].float().clone()

                hooks.callback(modules[f"{name}.experts"].register_forward_pre_hook(choose).remove)
        logits = theirs(ids[None], use_cache=False).logits[0].float()
    return values, logits


def _keep_angles(values: PlaceTensors, out: Any) -> None:
    if isinstance(out, tuple) and len(out) == 2 and all(isinstance(part, Tensor) for part in out):
        values.angles.append((out[0].detach().clone(), out[1].detach().clone()))


def _first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor of numbers in arguments or a result."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return next((found for each in inner if (found := _first_tensor(each)) is not None), None)


def compare_places(
    ours: Transformer, ids: Tensor, places: Sequence[Place], values: PlaceTensors, their_logits: Tensor
) -> tuple[PlaceDifference | None, float, list[Place]]:
    """Run our model with transformers' tensors in place of its own; return the first place that differs, the largest
    difference of any place, and the places that were not compared."""
    found: list[PlaceDifference] = []
    compared: set[Place] = set()
    largest = 0.0

    def compare(place: Place, mine: Tensor) -> Tensor:
        nonlocal largest
        expected = values.expected(place, len(ids))
        if expected is None or expected.shape != mine.shape:
            return mine
        compared.add(place)
        difference = _difference(place, mine, expected.to(mine.dtype))
        largest = max(largest, difference.size)
        if difference.size > LOCAL_BOUND:
            found.append(difference)
        return expected.to(mine.dtype)

    with ExitStack() as hooks:
        _with_norms_called(ours, hooks)
        for place in places:
            module = ours.get_submodule(place.ours)
            if place.side == "in":

                def enter(module: Any, given: Any, place: Place = place) -> Any:
                    return compare(place, given[0]), *given[1:]

                hooks.callback(module.register_forward_pre_hook(enter).remove)
            else:

                def leave(module: Any, given: Any, out: Tensor, place: Place = place) -> Tensor:
                    return compare(place, out)

                hooks.callback(module.register_forward_hook(leave).remove)
        for layer, chosen in values.chosen.items():
            _compare_choice(ours, layer, chosen, found, hooks)
        logits = ours.logits(ids)
    head = Place(None, "head", "head", ("lm_head",))
    difference = _difference(head, logits, their_logits)
    largest = max(largest, difference.size)
    found += [difference] if difference.size > LOCAL_BOUND else []
    first = found[0] if found else None
    explained = _explained(first, ours, values, len(ids)) if first is not None else None
    return explained, largest, [place for place in places if place not in compared]


def _with_norms_called(ours: Transformer, hooks: ExitStack) -> None:
    """Split the fused add and norm into two calls, so that hooks see the norm's output."""
    for module in ours.modules():
        if hasattr(module, "add_and_norm"):

            def add_and_norm(x: Tensor, residual: Tensor, module: nn.Module = module) -> tuple[Tensor, Tensor]:
                seen = module(x + residual)
                return vars(module).pop("entered", x + residual), seen

            def remember(module: nn.Module, given: Any, out: Any) -> None:
                vars(module)["entered"] = given[0]  # a hook may have replaced the sum

            vars(module)["add_and_norm"] = add_and_norm
            hooks.callback(vars(module).pop, "entered", None)
            hooks.callback(vars(module).pop, "add_and_norm")
            hooks.callback(module.register_forward_hook(remember).remove)


def _compare_choice(
    ours: Transformer, layer: int, chosen: tuple[Tensor, Tensor], found: list[PlaceDifference], hooks: ExitStack
) -> None:
    """Compare the experts and weights that a layer's router chooses with theirs."""
    mixture = cast(MixtureOfExperts, ours.get_submodule(f"blocks.{layer}.feedforward"))
    place = Place(layer, "router", f"blocks.{layer}.feedforward.router", ())
    choose = mixture.router.choose

    def compared(x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = choose(x)
        if experts.shape != chosen[0].shape:
            return weights, experts
        count = mixture.router.weight.shape[0]
        whole = [torch.zeros(len(x), count).scatter_(1, index, weight.float())
                 for index, weight in ((experts, weights), chosen)]  # fmt: skip
        difference = _difference(place, *whole)
        found.extend([difference] if difference.size > LOCAL_BOUND else [])
        return chosen[1].to(weights.dtype), chosen[0]

    vars(mixture.router)["choose"] = compared
    hooks.callback(vars(mixture.router).pop, "choose")


def _difference(place: Place, mine: Tensor, expected: Tensor) -> PlaceDifference:
    """Return the largest difference of any row, with the first position above the bound."""
    mine, expected = mine.reshape(len(mine), -1), expected.reshape(len(expected), -1)
    scale = expected.abs().amax(1).double()
    scale = scale.clamp_min(1e-6 * scale.max().item() + torch.finfo(torch.float32).tiny)[:, None]

    def sizes(rows: slice) -> Tensor:
        return ((mine[rows].double() - expected[rows].double()).abs() / scale[rows]).nan_to_num(math.inf)

    by_row = torch.cat([sizes(slice(at, at + ROWS_AT_ONCE)).amax(1) for at in range(0, len(mine), ROWS_AT_ONCE)])
    over = (by_row > LOCAL_BOUND).nonzero()
    position = int(over[0]) if len(over) else int(by_row.argmax())
    column = int(sizes(slice(position, position + 1)).argmax())
    return PlaceDifference(place, position, column, by_row.max().item())


def _explained(first: PlaceDifference, ours: Transformer, values: PlaceTensors, tokens: int) -> PlaceDifference:
    """Return a more precise difference: rotary angles within attention, or the part of a joint projection."""
    place = first.place
    if place.layer is None:
        return first
    module = place.module
    if place.ours.endswith(".attention.qkv") and place.side == "out":
        attention = ours.spec.layers[place.layer].attention
        head = first.column // attention.head_dim
        kinds = (("query", attention.num_heads), ("key", attention.num_kv_heads), ("value", attention.num_kv_heads))
        for kind, count in kinds:
            if head < count:
                module = f"{kind} projection"
                break
            head -= count
    elif place.module == "attention":
        rotary = ours.rotary_of_block[place.layer]
        if rotary is not None and values.angles and not _known_angles(ours.rotary[rotary], values, tokens):
            module = "rotary angles"
        else:
            module = "attention (positions, scores, mask or softmax)"
    return PlaceDifference(Place(**{**vars(place), "module": module}), first.position, first.column, first.size)


def _known_angles(table: nn.Module, values: PlaceTensors, tokens: int) -> bool:
    """Return whether one of their rotary modules returned these angles, with pairs as halves or interleaved."""
    rotated, positions = cast(int, table.num_rotated), torch.arange(tokens)
    angles = table(positions, torch.full_like(positions, tokens))
    mine = torch.cat([part[:, :rotated].float() for part in angles], dim=1)
    for cos, sin in values.angles:
        whole = [part.float().reshape(-1, part.shape[-1])[:tokens] for part in (cos, sin)]
        for columns in (slice(None, rotated), slice(None, None, 2)):
            both = torch.cat([part[:, columns] for part in whole], dim=1)
            if both.shape == mine.shape and (both - mine).abs().max() < ANGLE_BOUND:
                return True
    return False
