"""Helper functions that come before the kernels of a module, and how functions are declared and called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# @thread() gives this thread's number and how many there are. @share(count, unit, thread, threads) gives this thread's
# share [begin, end) of `count` things, in whole multiples of `unit`; @GOMP_barrier() waits for all threads.
THREADS = """func.func private @omp_get_thread_num() -> i32
func.func private @omp_get_num_threads() -> i32
func.func private @GOMP_barrier()
func.func private @thread() -> (index, index) {
  %id = call @omp_get_thread_num() : () -> i32
  %of = call @omp_get_num_threads() : () -> i32
  %thread = arith.index_cast %id : i32 to index
  %threads = arith.index_cast %of : i32 to index
  return %thread, %threads : index, index
}
func.func private @share(%count: index, %unit: index, %thread: index, %threads: index) -> (index, index) {
  %units = arith.ceildivui %count, %unit : index
  %each = arith.ceildivui %units, %threads : index
  %first = arith.muli %each, %thread : index
  %last = arith.addi %first, %each : index
  %begin = arith.muli %first, %unit : index
  %end = arith.muli %last, %unit : index
  %b = arith.minui %begin, %count : index
  %e = arith.minui %end, %count : index
  return %b, %e : index, index
}"""


class Named(NamedTuple):
    """A value by its name, without the percent sign, and its type."""

    name: str
    type: str


def indices(*names: str) -> list[Named]:
    """Return arguments that are indices."""
    return [Named(name, "index") for name in names]


def declare_arguments(arguments: Iterable[Named]) -> str:
    """Return arguments as a function's head lists them."""
    return ", ".join(f"%{name}: {kind}" for name, kind in arguments)


def call(function: str, given: Iterable[Named]) -> str:
    """Return a call of a function without results."""
    given = tuple(given)
    names = ", ".join(f"%{name}" for name, _ in given)
    return f"call @{function}({names}) : ({', '.join(kind for _, kind in given)}) -> ()"
