"""Helper functions that come before the kernels of a module, and how functions are declared and called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from compiled_kernels.mlir_text.lines import Lines
from compiled_kernels.mlir_text.target import number, vector

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


def declare_arguments(arguments: Iterable[Named]) -> str:
    """Return arguments as a function's head lists them."""
    return ", ".join(f"%{name}: {kind}" for name, kind in arguments)


def call(function: str, given: Iterable[Named]) -> str:
    """Return a call of a function without results."""
    given = tuple(given)
    names = ", ".join(f"%{name}" for name, _ in given)
    return f"call @{function}({names}) : ({', '.join(kind for _, kind in given)}) -> ()"


def thread_share(name: str, count: int, unit: int) -> str:
    """Return %{name}_begin and %{name}_end: this thread's share of `count` things, in whole multiples of `unit`."""
    return "\n".join(
        (
            f"%{name}_count = arith.constant {count} : index",
            f"%{name}_unit = arith.constant {unit} : index",
            f"%{name}_begin, %{name}_end = call @share(%{name}_count, %{name}_unit, %thread, %threads)"
            " : (index, index, index, index) -> (index, index)",
        )
    )


def exp_function(lanes: int) -> str:
    """Emit @exp(x) of vectors: e to the x, by 2^n times a polynomial (Cephes' expf: within 2 ulp); below
    -87 almost 0."""
    kind, whole = vector(lanes), vector(lanes, "i32")
    lines = Lines()

    def constant(value: float) -> str:
        return lines.constant(number(value), lanes)

    x = lines.let(f"arith.maximumf %x, {constant(-87.0)} : {kind}")
    x = lines.let(f"arith.minimumf {x}, {constant(88.0)} : {kind}")
    power = lines.let(f"arith.mulf {x}, {constant(1.4426950408889634)} : {kind}")
    n = lines.let(f"math.roundeven {power} : {kind}")
    r = lines.let(f"vector.fma {n}, {constant(-0.693359375)}, {x} : {kind}")
    r = lines.let(f"vector.fma {n}, {constant(2.12194440e-4)}, {r} : {kind}")
    p = constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = lines.let(f"vector.fma {p}, {r}, {constant(coefficient)} : {kind}")
    square = lines.let(f"arith.mulf {r}, {r} : {kind}")
    p = lines.let(f"vector.fma {p}, {square}, {r} : {kind}")
    p = lines.let(f"arith.addf {p}, {constant(1.0)} : {kind}")
    i = lines.let(f"arith.fptosi {n} : {kind} to {whole}")
    bias, shift = lines.constant("127", lanes, "i32"), lines.constant("23", lanes, "i32")
    bits = lines.let(f"arith.shli {lines.let(f'arith.addi {i}, {bias} : {whole}')}, {shift} : {whole}")
    scale = lines.let(f"arith.bitcast {bits} : {whole} to {kind}")
    result = lines.let(f"arith.mulf {p}, {scale} : {kind}")
    return f"func.func private @exp(%x: {kind}) -> {kind} {{\n{lines.text()}\nreturn {result} : {kind}\n}}"
