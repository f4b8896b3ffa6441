"""Compare a model with transformers' model of the same folder: logits, greedy tokens, and every intermediate tensor
that both compute ("place")."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workbench.check.lengths import GREEDY_TOKENS, long_length, short_lengths, thresholds_of
from workbench.check.place_differences import PlaceDifference, compare_places, record_places
from workbench.check.places import places_of
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner, generate
from workbench.kv_cache.pages import pages_for
from workbench.machine.processor import available_bytes
from workbench.model.checkpoint_names import CheckpointNames
from workbench.model.transformer import Transformer
from workbench.request import Request, SamplingParameters
from workbench.units import format_bytes

FLOAT_BYTES = 4
LOGIT_BOUND = 1e-4  # as a share of the largest logit: the whole model in float32
MAX_SECONDS = 120.0  # limit for comparing a long text, estimated from a short one
PASSES = 5  # forward passes over a whole text in one comparison, of both models together
CLEAR_MARGIN = 4 * LOGIT_BOUND  # share of the largest logit; a smaller margin of the best token is a tie


@dataclass(frozen=True)
class ModelComparison:
    """The findings of a comparison. `first` is the first intermediate tensor ("place") that differs, `largest` the
    largest relative difference at any place.

    `lengths` are the lengths of the compared texts in tokens; the other findings cover all texts up to the first text
    with a difference. `not_reached` names mechanisms that need a longer text, with the reason why none was compared.
    """

    logit_difference: float  # share of the largest logit
    logit_position: int | None  # first position that differs
    tokens: tuple[list[int], list[int]]  # greedy tokens, (ours, theirs)
    places: int  # number of compared places
    largest: float
    first: PlaceDifference | None
    lengths: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()  # our places without a tensor of theirs
    reached: tuple[str, ...] = ()  # mechanisms that the texts reach
    not_reached: tuple[str, ...] = ()
    seconds: float = 0.0  # one forward pass of theirs

    @property
    def equal(self) -> bool:
        return self.first is None and self.logit_position is None and self.tokens[0] == self.tokens[1]

    def as_json(self) -> dict[str, Any]:
        return {
            "equal": self.equal, "logit_difference": self.logit_difference, "logit_position": self.logit_position,
            "greedy_tokens": self.tokens[0], "their_greedy_tokens": self.tokens[1],
            "text_lengths": list(self.lengths), "reached": list(self.reached), "not_reached": list(self.not_reached),
            "places": self.places, "places_left_out": list(self.left_out),
            "largest_local_difference": self.largest,
            "first_difference": None if self.first is None else self.first.as_json(),
        }  # fmt: skip


def compare_models(ours: Transformer, theirs: Any, names: CheckpointNames) -> ModelComparison:
    """Compare two models in float32: their logits, greedy tokens, and every intermediate tensor that both compute.

    The texts are a short one, and a long one past the lengths at which mechanisms set in (a window, LongRoPE), if it is
    estimated to fit into MAX_SECONDS and free memory.

    Args:
        ours: our model, on the backend eager.
        theirs: a causal language model of transformers with the same weights.
        names: names of the family's modules.
    """
    spec = ours.spec
    each = []
    for length in short_lengths(spec):
        each.append(_compare_text(ours, theirs, names, length))
        if not each[-1].equal:
            break
    short = each[-1]
    max_tokens, reason = _max_tokens(ours, short)
    if short.equal and (length := long_length(spec, max_tokens)) is not None:
        each.append(_compare_text(ours, theirs, names, length))
    last, thresholds = each[-1], thresholds_of(spec)
    return replace(
        last,
        logit_difference=max(one.logit_difference for one in each),
        largest=max(one.largest for one in each),
        lengths=tuple(one.lengths[0] for one in each),
        reached=tuple(one.mechanism for one in thresholds if one.tokens <= last.lengths[0]),
        not_reached=tuple(
            f"{one.mechanism} ({reason if last.equal else 'a shorter text differs'})"
            for one in thresholds if one.tokens > last.lengths[0]
        ),
    )  # fmt: skip


def _max_tokens(ours: Transformer, short: ModelComparison) -> tuple[float, str]:
    """Return the maximum length of a text that fits the limits of time and memory, and the reason for the limit."""
    seconds = PASSES * short.seconds / (short.lengths[0] + GREEDY_TOKENS)
    tokens = MAX_SECONDS / seconds
    spec = ours.spec
    heads = max(1, *(getattr(kind.attention, "num_heads", 0) for kind in spec.layers))
    kept = FLOAT_BYTES * (3 * spec.vocab_size + 16 * len(spec.layers) * spec.hidden_size)  # bytes per token, about
    free = available_bytes() / 2
    # Solve for t: 3 * heads * t^2 scores of theirs and t rows of values fill half of the free memory.
    scores = 3 * FLOAT_BYTES * heads
    fitting = (math.sqrt(kept**2 + 4 * scores * free) - kept) / (2 * scores)
    if tokens <= fitting:
        return tokens, f"a text of this length would take more than {MAX_SECONDS:g} s, {seconds:.2g} s a token"
    return fitting, f"a text of this length would take more than half of the {format_bytes(2 * free)} that are free"


def _compare_text(ours: Transformer, theirs: Any, names: CheckpointNames, length: int) -> ModelComparison:
    """Compare the two models on a text of `length` tokens, the same every time."""
    ids = torch.randint(ours.spec.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    places, lacking = places_of(ours.spec, names, theirs)
    values, their_logits = record_places(theirs, ids, places, names)
    difference, position = _compare_logits(ours.logits(ids), their_logits)
    found, largest, left_out = compare_places(ours, ids, places, values, their_logits)
    tokens, seconds = _greedy(ours, theirs, ids)
    left_out = tuple(str(place) for place in (*lacking, *left_out))
    return ModelComparison(difference, position, tokens, len(places) + len(lacking) - len(left_out), largest, found,
                           (length,), left_out, seconds=seconds)  # fmt: skip


def _compare_logits(mine: Tensor, theirs: Tensor) -> tuple[float, int | None]:
    """Return the largest difference as a share of the largest logit, and the first position over the bound."""
    sizes = ((mine - theirs).abs().amax(1) / theirs.abs().max()).nan_to_num(math.inf)
    over = (sizes > LOGIT_BOUND).nonzero()
    return sizes.max().item(), int(over[0]) if len(over) else None


def _greedy(ours: Transformer, theirs: Any, ids: Tensor) -> tuple[tuple[list[int], list[int]], float]:
    """Return the greedy continuations, by our engine from its cache and by their model from the whole text, and the
    seconds of their model.

    Their model reads our tokens and gives its own choices. Both lists end with the first choice that differs, or before
    the first with a margin over the second-best token of at most `CLEAR_MARGIN`.
    """
    page_size = EngineConfig().cache.page_size
    pages = pages_for(len(ids) + GREEDY_TOKENS, page_size) + 1
    config = EngineConfig.build("demo", backend="eager", max_num_seqs=1, pages=pages)
    runner = Runner(config, LoadedModel(ours), report=lambda line: None)
    sampling = SamplingParameters(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True)
    mine = list(generate(runner, [Request("check", tuple(ids.tolist()), sampling)])["check"].token_ids)
    drawn: list[int] = []
    began = time.perf_counter()
    with torch.no_grad():
        logits = theirs(torch.tensor([[*ids.tolist(), *mine]]), use_cache=False).logits[0, len(ids) - 1 :]
    seconds = time.perf_counter() - began
    for token, row in zip(mine, logits, strict=False):
        best = row.topk(2)
        if best.values[0] - best.values[1] <= CLEAR_MARGIN * best.values[0].abs():
            break
        drawn.append(int(best.indices[0]))
        if drawn[-1] != token:
            break
    return (mine[: len(drawn)], drawn), seconds
