"""Run a rank that takes part in exchanges and computes nothing, for `experiments/tensor_parallel.py`."""

from __future__ import annotations

from typing import Any

import torch

from workbench.tensor_parallel.processes import join_ranks
from workbench.tensor_parallel.ranks import Ranks


def exchange(ranks: Ranks, content: tuple[int, str, int]) -> None:
    """Sum a row over all ranks, repeatedly: `content` is (width, dtype, number of times)."""
    width, dtype, times = content
    x = torch.ones(1, width, dtype=getattr(torch, dtype))
    for _ in range(times):
        ranks.all_reduce(x)


def main() -> None:
    ranks = join_ranks()

    def task(content: Any) -> None:
        exchange(ranks, content)

    ranks.serve({"exchange": task})


if __name__ == "__main__":
    main()
