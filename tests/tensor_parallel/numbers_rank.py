"""A rank that exchanges random numbers of its own (`test_transports.py`)."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.tensor_parallel.processes import join_ranks
from workbench.tensor_parallel.ranks import Ranks


def numbers(rank: int, count: int, dtype: str = "float32") -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(getattr(torch, dtype))


def exchange(ranks: Ranks, content: tuple[int, str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of all ranks' numbers, and on rank 0 all of them; note the sum, which all must have alike."""
    count, dtype, _ = content
    own = numbers(ranks.rank, count, dtype)
    total = ranks.all_reduce(own)
    ranks.record([total])
    return total, ranks.gather(own)


def fail(ranks: Ranks, who: int) -> None:
    if ranks.rank == who:
        raise WorkbenchError(f"no memory left here ({who})")
    ranks.all_reduce(torch.ones(3))


def part(ranks: Ranks, who: int) -> None:
    """Compute something else than the others on one rank."""
    ranks.record([torch.tensor([float(ranks.rank == who)])])


def hang(ranks: Ranks, who: int) -> None:
    if ranks.rank == who:
        threading.Event().wait()
    ranks.all_reduce(torch.ones(3))


def die(ranks: Ranks, who: int) -> None:
    if ranks.rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.all_reduce(torch.ones(3))


def main() -> None:
    ranks = join_ranks()

    def task(do: Any) -> Any:
        return lambda content: do(ranks, content)

    ranks.serve({each.__name__: task(each) for each in (exchange, fail, part, hang, die)})


if __name__ == "__main__":
    main()
