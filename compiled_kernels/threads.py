"""Work on several things at once, each in one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return `work` of each item, in order; results do not depend on the number of threads.

    Torch's own threads wait for one another after each operation: of many small ones on a busy machine they take a
    hundred times as long.
    """
    count, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()
    if count == 1:  # as in a thread of another such call
        return [work(item) for item in items]
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            return list(threads.map(torch.inference_mode(inference)(work), items))
    finally:
        torch.set_num_threads(count)  # of threads that come after
