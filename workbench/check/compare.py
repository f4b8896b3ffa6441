"""Compare a model with transformers' of the same folder, and name the first module that computes something else.

Their model runs once, and hooks keep what goes into its modules and comes out of them. Then ours runs, and at each
place that both have its tensor is compared with theirs and replaced by it. So a difference stays where it arises: no
place is blamed for one before it, and the bound can be near the rounding of float32.
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

from workbench.check.places import Place, mixture_name, places_of
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner, generate
from workbench.model.checkpoint_names import CheckpointNames
from workbench.model.feedforward import MixtureOfExperts
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.request import Request, SamplingParameters

PROMPT_TOKENS = 47  # no number of heads, so that an axis of tokens and one of heads differ in length
GREEDY_TOKENS = 8
LOCAL_BOUND = 2e-5  # of a row's largest number: one module in float32, its input equal
LOGIT_BOUND = 1e-4  # of the largest logit: the whole model in float32
ANGLE_BOUND = 1e-4  # of cosines and sines, which they may compute in float32
CLEAR_MARGIN = 4 * LOGIT_BOUND  # of the largest logit; a smaller one between the first two tokens decides nothing


@dataclass(frozen=True)
class PlaceDifference:
    """A tensor that differs at a place: from `position` on, there most in `column`, by `size` of the row's largest."""

    place: Place
    position: int
    column: int
    size: float

    def as_json(self) -> dict[str, Any]:
        place = self.place
        found = {"layer": place.layer, "module": place.module, "position": self.position, "column": self.column}
        return found | {"difference": self.size, "ours": place.ours, "theirs": list(place.theirs)}


@dataclass(frozen=True)
class ModelComparison:
    """The findings of a comparison. `first` is the first place that differs, `largest` the largest local difference."""

    logit_difference: float  # of the largest logit
    logit_position: int | None  # the first that differs
    tokens: tuple[list[int], list[int]]  # greedy, ours and theirs
    places: int
    largest: float
    first: PlaceDifference | None

    @property
    def equal(self) -> bool:
        return self.first is None and self.logit_position is None and self.tokens[0] == self.tokens[1]

    def as_json(self) -> dict[str, Any]:
        return {
            "equal": self.equal, "logit_difference": self.logit_difference, "logit_position": self.logit_position,
            "greedy_tokens": self.tokens[0], "their_greedy_tokens": self.tokens[1], "places": self.places,
            "largest_local_difference": self.largest,
            "first_difference": None if self.first is None else self.first.as_json(),
        }  # fmt: skip


def compare_models(ours: Transformer, theirs: Any, names: CheckpointNames) -> ModelComparison:
    """Compare logits, greedy tokens and every common place of two models in float32.

    Args:
        ours: our model, on the backend eager.
        theirs: a causal language model of transformers, of the same weights.
        names: names of the family's modules.
    """
    ids = prompt_ids(ours.spec)
    places = places_of(ours.spec, names, theirs)
    values, their_logits = _record(theirs, ids, places, names)
    difference, position = _compare_logits(ours.logits(ids), their_logits)
    found, largest = _compare_places(ours, ids, places, values, their_logits)
    return ModelComparison(difference, position, _greedy(ours, theirs, ids), len(places), largest, found)


def prompt_ids(spec: ModelSpec) -> Tensor:
    """Return the prompt's token ids [token], the same every time."""
    count = min(PROMPT_TOKENS, spec.max_position_embeddings - GREEDY_TOKENS)
    return torch.randint(spec.vocab_size, (max(count, 2),), generator=torch.Generator().manual_seed(0))


class _Values(dict[tuple[str, str], Tensor]):
    """Their tensors by module and side, each as it was; `angles` are what rotary modules returned, `chosen` the experts
    and weights that a mixture's module was given."""

    def __init__(self) -> None:
        super().__init__()
        self.angles: list[tuple[Tensor, Tensor]] = []
        self.chosen: dict[int, tuple[Tensor, Tensor]] = {}

    def expected(self, place: Place, tokens: int) -> Tensor | None:
        """Return their tensor of a place as ours would be; None where it has another shape."""
        parts = [self.get((name, place.side)) for name in place.theirs]
        if any(part is None for part in parts):
            return None
        rows = [_rows(cast(Tensor, part), tokens, place.heads) for part in parts]
        if any(part is None for part in rows):
            return None
        whole = torch.cat(cast("list[Tensor]", rows), dim=-1)
        return whole if place.columns is None else whole[..., list(place.columns)]


def _rows(tensor: Tensor, tokens: int, heads: int) -> Tensor | None:
    """Return [token, column], or [token, head, column] of tensors that are cut into heads."""
    if not heads:
        return tensor.reshape(tokens, -1) if tensor.numel() == tokens * tensor.shape[-1] else None
    tensor = tensor.squeeze(0)
    if tensor.ndim == 2 and len(tensor) == tokens:
        return rearrange(tensor, "token (head dim) -> token head dim", head=heads)
    if tensor.ndim == 3 and tensor.shape[:2] == (heads, tokens):
        tensor = rearrange(tensor, "head token dim -> token head dim")
    return tensor if tensor.ndim == 3 and tensor.shape[:2] == (tokens, heads) else None


@torch.no_grad()
def _record(theirs: Any, ids: Tensor, places: Sequence[Place], names: CheckpointNames) -> tuple[_Values, Tensor]:
    """Run their model, and return the tensors of the places and the logits [token, vocab]."""
    values, modules = _Values(), dict(theirs.named_modules())
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


def _keep_angles(values: _Values, out: Any) -> None:
    if isinstance(out, tuple) and len(out) == 2 and all(isinstance(part, Tensor) for part in out):
        values.angles.append((out[0].detach().clone(), out[1].detach().clone()))


def _first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor of numbers in arguments or a result."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return next((found for each in inner if (found := _first_tensor(each)) is not None), None)


def _compare_places(
    ours: Transformer, ids: Tensor, places: Sequence[Place], values: _Values, their_logits: Tensor
) -> tuple[PlaceDifference | None, float]:
    """Run ours on their tensors; return the first place that differs, and the largest difference of all places."""
    found: list[PlaceDifference] = []
    largest = 0.0

    def compare(place: Place, mine: Tensor) -> Tensor:
        nonlocal largest
        expected = values.expected(place, len(ids))
        if expected is None or expected.shape != mine.shape:
            return mine
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
    return _explained(first, ours, values, len(ids)) if first is not None else None, largest


def _with_norms_called(ours: Transformer, hooks: ExitStack) -> None:
    """Add and norm in two calls, so that hooks see the norm's."""
    for module in ours.modules():
        if hasattr(module, "add_and_norm"):

            def add_and_norm(x: Tensor, residual: Tensor, module: nn.Module = module) -> tuple[Tensor, Tensor]:
                seen = module(x + residual)
                return vars(module).pop("entered", x + residual), seen

            def remember(module: nn.Module, given: Any, out: Any) -> None:
                vars(module)["entered"] = given[0]  # what a hook put in the sum's place

            vars(module)["add_and_norm"] = add_and_norm
            hooks.callback(vars(module).pop, "entered", None)
            hooks.callback(vars(module).pop, "add_and_norm")
            hooks.callback(module.register_forward_hook(remember).remove)


def _compare_choice(
    ours: Transformer, layer: int, chosen: tuple[Tensor, Tensor], found: list[PlaceDifference], hooks: ExitStack
) -> None:
    """Compare the experts that a layer's router chooses, and their weights, with theirs."""
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
    """Return the largest difference of any row, and the first position that has more than the bound."""
    mine, expected = mine.reshape(len(mine), -1).double(), expected.reshape(len(expected), -1).double()
    scale = expected.abs().amax(1).clamp_min(1e-6 * expected.abs().max().item() + torch.finfo(torch.float32).tiny)
    sizes = ((mine - expected).abs() / scale[:, None]).nan_to_num(math.inf)
    by_row = sizes.amax(1)
    over = (by_row > LOCAL_BOUND).nonzero()
    position = int(over[0]) if len(over) else int(by_row.argmax())
    return PlaceDifference(place, position, int(sizes[position].argmax()), by_row.max().item())


def _explained(first: PlaceDifference, ours: Transformer, values: _Values, tokens: int) -> PlaceDifference:
    """Say of attention whether the angles of its rotary differ, and of a joint projection which part."""
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
        turn = ours.rotary_of_block[place.layer]
        if turn is not None and values.angles and not _known_angles(ours.rotary[turn], values, tokens):
            module = "rotary angles"
        else:
            module = "attention (positions, scores, mask or softmax)"
    return PlaceDifference(Place(**{**vars(place), "module": module}), first.position, first.column, first.size)


def _known_angles(table: nn.Module, values: _Values, tokens: int) -> bool:
    """Return whether any rotary module of theirs returned these angles, its pairs as halves or interleaved."""
    turned = cast(int, table.num_rotated)
    mine = torch.cat([part[:, :turned].float() for part in table(torch.arange(tokens))], dim=1)
    for cos, sin in values.angles:
        whole = [part.float().reshape(-1, part.shape[-1])[:tokens] for part in (cos, sin)]
        for columns in (slice(None, turned), slice(None, None, 2)):
            both = torch.cat([part[:, columns] for part in whole], dim=1)
            if both.shape == mine.shape and (both - mine).abs().max() < ANGLE_BOUND:
                return True
    return False


def _compare_logits(mine: Tensor, theirs: Tensor) -> tuple[float, int | None]:
    """Return the largest difference as a share of the largest logit, and the first position over the bound."""
    sizes = ((mine - theirs).abs().amax(1) / theirs.abs().max()).nan_to_num(math.inf)
    over = (sizes > LOGIT_BOUND).nonzero()
    return sizes.max().item(), int(over[0]) if len(over) else None


def _greedy(ours: Transformer, theirs: Any, ids: Tensor) -> tuple[list[int], list[int]]:
    """Return the greedy continuations: of our engine from its cache, of theirs from whole texts.

    They end before a token whose margin over the second is within the bound of the logits.
    """
    config = EngineConfig.build("demo", backend="eager", max_num_seqs=1, pages=2)
    runner = Runner(config, LoadedModel(ours), report=lambda line: None)
    sampling = SamplingParameters(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True)
    mine = list(generate(runner, [Request("check", tuple(ids.tolist()), sampling)])["check"].token_ids)
    text = ids.tolist()
    with torch.no_grad():
        for _ in range(GREEDY_TOKENS):
            best = theirs(torch.tensor([text]), use_cache=False).logits[0, -1].topk(2)
            if best.values[0] - best.values[1] <= CLEAR_MARGIN * best.values[0].abs():
                break
            text.append(int(best.indices[0]))
    drawn = text[len(ids) :]
    return mine[: len(drawn)], drawn
