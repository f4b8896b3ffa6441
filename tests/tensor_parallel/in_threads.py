"""Ranks as threads of one process: the same memory, words and sums as between processes, a thousand times a test."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compiled_kernels import Backend
from tests.patience import limit
from workbench.engine.config import EngineConfig, parse_dtype
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner
from workbench.executors.requirements import Requirements
from workbench.executors.select import Backends
from workbench.kv_cache.store import KVStore
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec
from workbench.tensor_parallel.cut import cut_state
from workbench.tensor_parallel.executor import tasks_of
from workbench.tensor_parallel.ranks import STOP, NoPeers, RankFailed, Ranks
from workbench.tensor_parallel.shared_memory import SharedMemoryGroup
from workbench.tensor_parallel.transformer import TensorParallelTransformer

Task = Callable[[Any], Any]


class Threads:
    """The other ranks, as rank 0 sees them."""

    can_end = False
    threads: list[threading.Thread]

    def check(self) -> None:
        if not all(thread.is_alive() for thread in self.threads):
            raise RankFailed("a rank's thread has ended")

    def end(self) -> None:
        """Leave them: they end with the test's process."""


@contextmanager
def serving(tasks: Callable[[Ranks], dict[str, Task]], size: int, timeout: float | None = None) -> Iterator[Ranks]:
    """Give rank 0 while threads serve as the others, each with its own `tasks`."""
    memory, store = mmap.mmap(-1, SharedMemoryGroup.memory_bytes(size)), torch.distributed.HashStore()
    peers, seconds = Threads(), timeout or limit(10)
    groups = [SharedMemoryGroup(memory, rank, size) for rank in range(size)]
    ranks = [Ranks(group, store, seconds, NoPeers() if rank else peers) for rank, group in enumerate(groups)]
    threads = [threading.Thread(target=each.serve, args=(tasks(each),), daemon=True) for each in ranks[1:]]
    for thread in threads:
        thread.start()
    peers.threads = threads
    yield ranks[0]
    peers.threads = []  # those that stop are missed no more
    ranks[0].lead(STOP, None, lambda: None)
    for thread in threads:
        thread.join()


def share(
    spec: ModelSpec, state: dict[str, Tensor], format: WeightFormat, ranks: Ranks, backend: Backend = Backend.EAGER
) -> TensorParallelTransformer:
    """Build a rank's share of a model whose state is stored as `format` says."""
    own = cut_state(state, spec, ranks.rank, ranks.size)
    return TensorParallelTransformer.of_rank(spec, own, backend, format, ranks)


@dataclass
class Others:
    """The other ranks, as a runner holds them."""

    ranks: Ranks
    threads: int = 1

    def close(self) -> None:
        """Leave them: `serving` ends them."""


@contextmanager
def runner_of_ranks(
    spec: ModelSpec, state: dict[str, Tensor], format: WeightFormat, size: int, backend: Backend, **settings: Any
) -> Iterator[Runner]:
    """Give a runner of a model that `size` ranks share, whose unwritten cache is NaN on each."""

    def poisoned(store: KVStore) -> KVStore:
        for table in range(len(store.groups)):
            for tensor in store.page_tensors(table):
                tensor.view(torch.uint8).fill_(255)
        return store

    def tasks(ranks: Ranks) -> dict[str, Task]:
        model = share(spec, state, format, ranks, backend)
        shapes = model.cache_shapes(config.cache)

        def open_store(pages: tuple[int, ...], page_size: int, dtype: str, _: str) -> KVStore:
            return poisoned(KVStore(shapes, pages, page_size, parse_dtype(dtype)))

        return tasks_of(lambda: model, open_store)

    config = EngineConfig.build("demo", backend=backend, tensor=size, **settings)
    with serving(tasks, size) as first:
        model = share(spec, state, format, first, backend)
        wanted = Requirements(spec, model.dtype, format, model.cache_shapes(config.cache), model.dtype, ranks=size)
        backends = Backends.uniform(backend, "a test's", wanted)
        runner = Runner(config, LoadedModel(model, backends=backends, processes=Others(first)))
        poisoned(runner.store)
        yield runner


def logits_of_ranks(
    spec: ModelSpec, state: dict[str, Tensor], format: WeightFormat, size: int, ids: list[int]
) -> Tensor:
    """Return the logits [token, vocab] of a text, computed by `size` ranks."""

    def tasks(ranks: Ranks) -> dict[str, Task]:
        model = share(spec, state, format, ranks)
        return {"logits": model.logits}

    with serving(tasks, size) as first:
        model = share(spec, state, format, first)
        return first.lead("logits", ids, lambda: model.logits(ids))
