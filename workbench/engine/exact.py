"""Compute reference logits of a decode step: one token over a cache of random keys and values, in higher precision."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Lane
from workbench.batch import TokenBatch
from workbench.cache.pages import pages_for
from workbench.cache.shapes import CacheShape
from workbench.cache.store import KVStore, Layer
from workbench.cache.tables import tables_of
from workbench.engine.packing import pack
from workbench.engine.plan import Span, StepPlan
from workbench.model.layers import Angles, Block
from workbench.model.parts import Linear
from workbench.model.quantized import Activations
from workbench.model.transformer import Transformer
from workbench.request import Request, Sequence

ROOM = 2  # times the error of the modules themselves: another order of summation, another place to round
FLIPPED = 0.25  # of what activations in INT8 change: a number between two INT8 values may become either
ROUNDINGS = 8  # of numbers as large as the logits, where the modules happen to be exact
SPARE = 2  # pools have this many times the pages of the sequence


@dataclass(frozen=True)
class Held:
    """The layout of a store, without its number of pages."""

    shapes: tuple[CacheShape, ...]
    page_size: int
    dtype: torch.dtype


def decode_of_one(model: Transformer, held: Held, context: int, seed: int = 0) -> tuple[KVStore, StepPlan]:
    """Build a decode of one token after `context_tokens` others, and a store with their random keys and values in
    shuffled pages.

    What the sequence does not hold is NaN in floating-point pages.
    """
    length = min(context + 1, model.spec.context)
    count, tables = pages_for(length, held.page_size), len(tables_of(shape.tables for shape in held.shapes))
    store = KVStore(held.shapes, (SPARE * count,) * tables, held.page_size, held.dtype, str(model.device))
    for pages in (part for table in range(tables) for part in store.paged(table)):
        if pages.is_floating_point():
            pages[1:] = torch.nan
    draw = random.Random(seed)
    tokens = [draw.randrange(model.spec.vocab) for _ in range(length)]
    sequence = Sequence.of(Request("trial", tuple(tokens[:-1])), 0)
    sequence.token_ids.append(tokens[-1])
    sequence.pages = tuple(draw.sample(range(1, SPARE * count + 1), count) for _ in range(tables))
    if length > 1:
        before = pack(StepPlan(0, (Span(sequence, 0, length - 1, False),)), held.page_size, model.device)
        dice = torch.Generator().manual_seed(seed)
        for shape, layer in zip(held.shapes, store.layers, strict=True):
            drawn = torch.randn(2, length - 1, shape.groups, shape.dim, generator=dice).to(model.device, model.dtype)
            layer.write(drawn[0], drawn[1], before)
    sequence.computed = length - 1
    return store, StepPlan(0, (Span.of(sequence, 1),))


def expected(model: Transformer, store: KVStore, plan: StepPlan) -> tuple[Tensor, float]:
    """The exact logits of the plan's rows, [sample, vocab] in float64, and how far another way of computing them may
    be away: `ROOM` times the error that the modules make on the lane eager in their own precision, and a rounding; with
    activations in INT8 also `FLIPPED` of what these change."""
    higher = torch.float32 if model.dtype.itemsize < 4 else torch.float64
    exact = _eager(model, store, plan, higher).double()
    plain = _eager(model, store, plan, model.dtype).double()
    rounding = ROUNDINGS * torch.finfo(model.dtype).eps * (1 + exact.abs().max().item())
    if model.format.activations != "float":
        unquantized = _eager(model, store, plan, higher, "float").double()
        rounding += FLIPPED * (unquantized - exact).abs().max().item()
    return exact, ROOM * (plain - exact).abs().max().item() + rounding


def _eager(
    model: Transformer, store: KVStore, plan: StepPlan, dtype: torch.dtype, activations: Activations | None = None
) -> Tensor:
    """Logits by the modules as written, on the lane eager in `dtype`, with the model's own activations unless given.
    Weights are cast a block at a time."""
    batch = pack(plan, store.page_size, model.device)
    own = KVStore(store.shapes, store.pages, store.page_size, dtype, str(model.device))
    for table in range(len(store.tables)):
        for mine, theirs in zip(own.paged(table), store.paged(table), strict=True):
            mine.copy_(theirs)

    def run(block: Block, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: Layer) -> Tensor:
        return here(block)(x.to(dtype), cos, sin, batch, cache)

    def here(module: nn.Module) -> nn.Module:
        """A copy on the lane eager; cast only to another type: scales are more precise than the model's own."""
        made = copy.deepcopy(module)
        for part in made.modules():
            if "lane" in vars(part):
                vars(part)["lane"] = Lane.EAGER
            if isinstance(part, Linear) and activations is not None:
                part.activations = activations
        return made if dtype == model.dtype else made.to(dtype)

    x = here(model.norm)(model.hidden(batch, own, run)[batch.sample_rows])
    if model.head is not None:
        return model.capped(here(model.head)(x))
    return model.capped(compiled_kernels.linear(x, model.head_tensors[0].to(dtype)))
