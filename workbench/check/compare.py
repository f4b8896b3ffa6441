"""Compare a model with transformers' of the same folder: logits, greedy tokens, and every place that both have."""

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
from workbench.memory.report import format_bytes
from workbench.model.checkpoint_names import CheckpointNames
from workbench.model.transformer import Transformer
from workbench.request import Request, SamplingParameters

FLOAT_BYTES = 4
LOGIT_BOUND = 1e-4  # of the largest logit: the whole model in float32
MAX_SECONDS = 120.0  # that comparing a long text may take, estimated from a short one
PASSES = 5  # forward passes of a whole text that a comparison makes of the two models
CLEAR_MARGIN = 4 * LOGIT_BOUND  # of the largest logit; a smaller one between the first two tokens decides nothing


@dataclass(frozen=True)
class ModelComparison:
    """The findings of a comparison. `first` is the first place that differs, `largest` the largest local difference.

    `lengths` are those of the texts compared, in tokens; the other findings are of all of them up to the first that
    differs. `not_reached` are mechanisms that set in on longer texts only, and the reason why none was compared.
    """

    logit_difference: float  # of the largest logit
    logit_position: int | None  # the first that differs
    tokens: tuple[list[int], list[int]]  # greedy, ours and theirs
    places: int  # that were compared
    largest: float
    first: PlaceDifference | None
    lengths: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()  # places of ours without a tensor of theirs to compare
    reached: tuple[str, ...] = ()  # mechanisms that set in within the texts
    not_reached: tuple[str, ...] = ()
    seconds: float = 0.0  # of one pass of theirs

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
    """Compare logits, greedy tokens and every common place of two models in float32.

    They are compared on a short text, and on one past every length at which a mechanism sets in (a window, LongRoPE)
    that is estimated to take no more than MAX_SECONDS and the memory that is free.

    Args:
        ours: our model, on the backend eager.
        theirs: a causal language model of transformers, of the same weights.
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
    """Return the tokens of a text whose comparison fits into the time and the memory, and the reason for no more."""
    seconds = PASSES * short.seconds / (short.lengths[0] + GREEDY_TOKENS)
    tokens = MAX_SECONDS / seconds
    spec = ours.spec
    heads = max(1, *(getattr(kind.attention, "num_heads", 0) for kind in spec.layers))
    kept = FLOAT_BYTES * (3 * spec.vocab_size + 16 * len(spec.layers) * spec.hidden_size)  # of a token, about
    free = available_bytes() / 2
    # 3 heads t^2 scores of theirs and t rows of values: the t at which they fill half of what is free.
    scores = 3 * FLOAT_BYTES * heads
    fitting = (math.sqrt(kept**2 + 4 * scores * free) - kept) / (2 * scores)
    if tokens <= fitting:
        return tokens, f"a text as long would take more than {MAX_SECONDS:g} s, {seconds:.2g} s a token"
    return fitting, f"a text as long would take more than half of the {format_bytes(2 * free)} that are free"


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
    """Return the greedy continuations, of our engine from its cache and of theirs from the whole text, and the seconds
    that theirs took.

    Theirs reads our tokens, and says which it would have chosen: up to the first that differs, or whose margin over the
    second is within the bound of the logits.
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
