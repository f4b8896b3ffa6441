"""Ranks as threads of one process: the same memory, words and sums as between processes, a thousand times a test."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from compiled_kernels import Backend
from tests.patience import limit
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec
from workbench.tensor_parallel.cut import cut_state
from workbench.tensor_parallel.ranks import STOP, NoPeers, RankFailed
from workbench.tensor_parallel.shared_memory import SharedMemoryRanks as Ranks
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
    memory = mmap.mmap(-1, Ranks.memory_bytes(size))
    peers = Threads()
    ranks = [Ranks(memory, rank, size, timeout or limit(10), NoPeers() if rank else peers) for rank in range(size)]
    threads = [threading.Thread(target=each.serve, args=(tasks(each),), daemon=True) for each in ranks[1:]]
    for thread in threads:
        thread.start()
    peers.threads = threads
    yield ranks[0]
    peers.threads = []  # those that stop are missed no more
    ranks[0].lead(STOP, None, lambda: None)
    for thread in threads:
        thread.join()


def share(spec: ModelSpec, state: dict[str, Tensor], format: WeightFormat, ranks: Ranks) -> TensorParallelTransformer:
    """Build a rank's share of a model whose state is stored as `format` says."""
    own = cut_state(state, spec, ranks.rank, ranks.size)
    return TensorParallelTransformer.of_rank(spec, own, Backend.EAGER, format, ranks)


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
