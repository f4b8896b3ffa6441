"""Process several items at once, each in one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
_starting = Lock()


def in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return the results of `work` for each item, in order; they do not depend on the number of threads.

    Torch's own threads synchronize after each operation: many small operations on a busy machine take a hundred times
    as long.
    """
    items, threads = list(items), torch.get_num_threads()
    if threads == 1 or not items:
        return [work(item) for item in items]
    count = min(threads, len(items))
    inference, gradients, started = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), Barrier(count + 1)

    def start() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # torch reads its setting once in each thread: here
        started.wait()

    def run(item: Item) -> Result:
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            return work(item)

    with ThreadPoolExecutor(count, initializer=start) as pool:
        with _starting:  # otherwise a thread that first uses torch now would keep a thread count of one
            found = pool.map(run, items)
            started.wait()
            torch.set_num_threads(threads)
        return list(found)
