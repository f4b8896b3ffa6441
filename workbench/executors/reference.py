"""Compare the logits of backends with reference logits in higher precision, for a decode step of one token over a cache
of random keys and values.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Backend
from workbench.batch import TokenBatch
from workbench.executors.packing import pack_batch
from workbench.kv_cache.format import KVCacheSpec
from workbench.kv_cache.layer import CacheLayer
from workbench.kv_cache.pages import build_cache_groups, pages_for
from workbench.kv_cache.store import KVStore
from workbench.model.layers import TransformerBlock
from workbench.model.linear import Linear
from workbench.model.mixer import Angles
from workbench.model.quantized import Activations
from workbench.model.transformer import Transformer
from workbench.request import Request, Sequence, StatePages, random_token_ids
from workbench.scheduler.plan import Span, StepPlan

Module = TypeVar("Module", bound=nn.Module)
CLEARLY_FASTER_RATIO = 0.8  # a backend is clearly faster below this fraction of another's time
ERROR_FACTOR = 2  # factor on the eager modules' own error: other orders of summation, other rounding
FLIPPED = 0.25  # fraction of the change by INT8 activations: a number between two INT8 values may be rounded to either
ROUNDING_FACTOR = 8  # relative to the logits, in case the eager modules happen to be exact
POOL_FACTOR = 2  # pools have this many times the pages of the sequence


@dataclass(frozen=True)
class CacheLayout:
    """The layout of a store of keys and values, without its number of pages."""

    specs: tuple[KVCacheSpec, ...]
    page_size: int
    dtype: torch.dtype


def single_decode_step(
    model: Transformer, layout: CacheLayout, context_tokens: int, seed: int = 0
) -> tuple[KVStore, StepPlan]:
    """Build a store with random keys and values in shuffled pages, and the plan of a decode of one token after
    `context_tokens` tokens.

    Unused slots of floating-point pages are NaN.
    """
    length = min(context_tokens + 1, model.spec.max_position_embeddings)
    groups, count = (
        build_cache_groups(shape.cache_groups for shape in layout.specs),
        pages_for(length, layout.page_size),
    )
    tables = len(groups)
    store = KVStore(layout.specs, (POOL_FACTOR * count,) * tables, layout.page_size, layout.dtype, str(model.device))
    for pages in (part for table in range(tables) for part in store.page_tensors(table)):
        if pages.is_floating_point():
            pages[1:] = torch.nan
    draw = random.Random(seed)
    tokens = random_token_ids(draw, model.spec.vocab_size, length)
    sequence = Sequence.from_request(Request("trial", tokens[:-1]), 0)
    sequence.token_ids.append(tokens[-1])
    shuffled = [draw.sample(range(1, POOL_FACTOR * count + 1), count + 1) for _ in range(tables)]
    sequence.pages = tuple(pages[:count] for pages in shuffled)
    sequence.states = {t: StatePages([shuffled[t][count]]) for t, group in enumerate(groups) if group.is_recurrent}
    if length > 1:
        before = pack_batch(StepPlan(0, (Span(sequence, 0, length - 1, False),)), layout.page_size, model.device)
        dice = torch.Generator().manual_seed(seed)
        for shape, layer in zip(layout.specs, store.layers, strict=True):
            if shape.state is not None:
                for part in layer.page_tensors(shape.state_group):
                    part[1:] = torch.randn(part[1:].shape, generator=dice)
            if not shape.num_kv_heads:
                continue
            drawn = torch.randn(2, length - 1, shape.num_kv_heads, shape.head_dim, generator=dice).to(
                model.device, model.dtype
            )
            layer.write(drawn[0], drawn[1], before)
    sequence.num_computed_tokens = length - 1
    return store, StepPlan(0, (Span.next_tokens(sequence, 1),))


def reference_logits(model: Transformer, store: KVStore, plan: StepPlan) -> tuple[Tensor, float]:
    """Compute the exact logits of the plan's rows, [sample, vocab] in float64, and the error that is tolerated of
    backends.

    The tolerance is `ERROR_FACTOR` times the error of the modules on the backend eager in their own precision, plus a
    rounding error; with INT8 activations also `FLIPPED` times the change by quantizing the activations.
    """
    higher = torch.float32 if model.dtype.itemsize < 4 else torch.float64
    exact = _eager(model, store, plan, higher).double()
    plain = _eager(model, store, plan, model.dtype).double()
    rounding = ROUNDING_FACTOR * torch.finfo(model.dtype).eps * (1 + exact.abs().max().item())
    if model.format.activations != "float":
        unquantized = _eager(model, store, plan, higher, "float").double()
        rounding += FLIPPED * (unquantized - exact).abs().max().item()
    return exact, ERROR_FACTOR * (plain - exact).abs().max().item() + rounding


def _eager(
    model: Transformer, store: KVStore, plan: StepPlan, dtype: torch.dtype, activations: Activations | None = None
) -> Tensor:
    """Return the logits of the eager modules in `dtype`, by default with the model's own activation format. Weights are
    cast block by block.
    """
    batch = pack_batch(plan, store.page_size, model.device)
    own = KVStore(store.specs, store.num_pages, store.page_size, dtype, str(model.device))
    for table in range(len(store.groups)):
        for mine, theirs in zip(own.page_tensors(table), store.page_tensors(table), strict=True):
            mine.copy_(theirs)

    def here(module: Module) -> Module:
        return eager_copy(module, None if dtype == model.dtype else dtype, activations)

    def run(
        block: TransformerBlock, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: CacheLayer
    ) -> Tensor:
        return here(block)(x.to(dtype), cos, sin, batch, cache)

    x = model.hidden_states(batch, own, run)[batch.logits_indices]
    x = here(model.norm)(x if model.streams is None else here(model.streams).hidden(x))
    if model.head is not None:
        return model.cap_logits(here(model.head)(x))
    return model.cap_logits(compiled_kernels.linear(x, model.head_tensors[0].to(dtype)))


def eager_copy(module: Module, dtype: torch.dtype | None, activations: Activations | None = None) -> Module:
    """Return a copy of a module on the backend eager, cast to `dtype` if it is given. Without `dtype`, scales that are
    more precise than the model's dtype stay so.
    """
    made = copy.deepcopy(module)
    for part in made.modules():
        if "backend" in vars(part):
            vars(part)["backend"] = Backend.EAGER
        if isinstance(part, Linear) and activations is not None:
            part.activations = activations
    return made if dtype is None else made.to(dtype)
