"""Threads of one call: every thread runs all of a kernel, and takes its share of what is divided among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from compiled_kernels.builder.functions import Given, call, declare, function
from compiled_kernels.builder.target import Named
from compiled_kernels.builder.values import Value, index

NUMBERS = {"thread": "omp_get_thread_num", "threads": "omp_get_num_threads"}


@contextmanager
def entry(name: str, arguments: Iterable[Named]) -> Iterator[Given]:
    """Make a module's one public function, which all threads run at once; gives its arguments by name, with them this
    thread's number as `thread`, and how many there are as `threads`."""
    for each in NUMBERS.values():
        declare(each, [], ["i32"])
    declare("GOMP_barrier", [], [])
    with function(name, arguments, private=False) as given:
        yield given | {each: call(number, [], ["i32"])[0].to("index") for each, number in NUMBERS.items()}


def share(given: Given, count: Value | int, unit: int) -> list[Value]:
    """Return begin and end of this thread's share of `count` things, in whole multiples of `unit`."""
    count = index(count) if isinstance(count, int) else count
    each = count.divided_up(unit).divided_up(given["threads"]) * unit
    begin = each * given["thread"]
    return [place.minimum(count) for place in (begin, begin + each)]


def wait() -> None:
    """Wait for all threads."""
    call("GOMP_barrier", [])
