"""Steps of one text whose tokens are given: what a model makes of it chunk by chunk, from pages in no order."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from tests.engine.tiny import every_tensor
from workbench.executors.programs.eager import EagerProgram
from workbench.executors.step_runner import StepRunner
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import PagePool, build_cache_groups, pages_for
from workbench.kv_cache.store import KVStore
from workbench.model.transformer import Transformer
from workbench.request import Request, Sequence
from workbench.scheduler.plan import Span, StepPlan


def forced(
    model: Transformer,
    ids: Tensor,
    chunks: tuple[int, ...],
    executor: Any = None,
    size: int = 4,
) -> Tensor:
    """Logits of each step's last row: of every chunk, then of every token after them, one by one."""
    shapes, pages = model.cache_shapes(), pages_for(len(ids), size)
    tables = len(build_cache_groups(shape.cache_groups for shape in shapes))
    store = KVStore(shapes, (pages,) * tables, size, model.dtype)
    for tensor in every_tensor(store):
        tensor[:] = torch.nan
    orders = (random.Random(table).sample(range(1, pages + 1), pages) for table in range(tables))
    manager = KVCacheManager([PagePool(pages, size, order) for order in orders], store.groups, len(ids))
    sequence = Sequence.from_request(Request("forced", ()), 0)
    sequence.length_limit = len(ids)
    sequence.pages = tuple([] for _ in range(tables))
    runs = StepRunner(EagerProgram(model, store)) if executor is None else executor(model, store)
    rows = []
    lengths = [*chunks, *[1] * (len(ids) - sum(chunks))]
    for length in lengths:
        sequence.token_ids.extend(ids[sequence.num_computed_tokens : sequence.num_computed_tokens + length].tolist())
        manager.allocate(sequence)
        rows.append(runs.forward(StepPlan(0, (Span.next_tokens(sequence, length),)))[0].clone())
        sequence.num_computed_tokens += length
        end = sequence.num_computed_tokens
        manager.commit_states(sequence, end - length, end, end)
        manager.update_after_step(sequence)
    return torch.stack(rows)
