"""Divide the work of one call among threads: every thread runs the whole kernel and computes its share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from compiled_kernels.builder.functions import Given, call, declare, function
from compiled_kernels.builder.target import Named
from compiled_kernels.builder.values import Value, index

NUMBERS = {"thread": "omp_get_thread_num", "threads": "omp_get_num_threads"}


@contextmanager
def entry(name: str, arguments: Iterable[Named]) -> Iterator[Given]:
    """Build the module's one public function, which all threads run at once. Yields its arguments by name, with this
    thread's number as `thread` and the number of threads as `threads`."""
    for each in NUMBERS.values():
        declare(each, [], ["i32"])
    declare("GOMP_barrier", [], [])
    with function(name, arguments, private=False) as given:
        yield given | {each: call(number, [], ["i32"])[0].to("index") for each, number in NUMBERS.items()}


def share(given: Given, count: Value | int, unit: int) -> list[Value]:
    """Return the first item and the end of this thread's share of `count` items, both in multiples of `unit`."""
    count = index(count) if isinstance(count, int) else count
    each = count.divided_up(unit).divided_up(given["threads"]) * unit
    begin = each * given["thread"]
    return [place.minimum(count) for place in (begin, begin + each)]


def wait() -> None:
    """Emit a barrier: each thread waits for all threads."""
    call("GOMP_barrier", [])
