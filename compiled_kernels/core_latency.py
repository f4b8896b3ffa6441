"""Measure the latency of a cache line between cores, which shows the machine's core placement.

Two threads pass a number back and forth through one cache line. On a processor with several core complexes, this takes
about 20 ns within one complex and about 100 ns between two. The cores of a virtual machine move between complexes,
which changes the speed of memory and shared caches. So rounds of a measurement are compared only within one placement.
"""

from __future__ import annotations

import functools
import os
import time

import torch

from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir.invoke import BoundCall, libgomp_path

ROUND_TRIPS = 100  # round trips per sample
SAMPLES = 101
BUDGET_SECONDS = 0.5  # if the cores are busy, a trip may take a scheduler's time slice

_TEXT = f"""func.func private @omp_get_thread_num() -> i32
func.func private @omp_get_num_threads() -> i32
func.func @hand_over(%line: memref<16xi64>) {{
  %id = call @omp_get_thread_num() : () -> i32
  %of = call @omp_get_num_threads() : () -> i32
  %thread = arith.index_cast %id : i32 to index
  %threads = arith.index_cast %of : i32 to index
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %trips = arith.constant {ROUND_TRIPS} : index
  %one64 = arith.constant 1 : i64
  %mine = arith.index_cast %thread : index to i64
  %two_threads = arith.constant 2 : index
  %alone = arith.cmpi ult, %threads, %two_threads : index
  %count = arith.select %alone, %zero, %trips : index
  %address = memref.extract_aligned_pointer_as_index %line : memref<16xi64> -> index
  %address64 = arith.index_cast %address : index to i64
  %pointer = llvm.inttoptr %address64 : i64 to !llvm.ptr
  scf.for %trip = %zero to %count step %one {{
    %trip64 = arith.index_cast %trip : index to i64
    %two = arith.addi %trip64, %trip64 : i64
    %awaited = arith.addi %two, %mine : i64
    scf.while : () -> () {{
      %now = llvm.load %pointer atomic acquire {{alignment = 8 : i64}} : !llvm.ptr -> i64
      %wait = arith.cmpi ne, %now, %awaited : i64
      scf.condition(%wait)
    }} do {{
      scf.yield
    }}
    %next = arith.addi %awaited, %one64 : i64
    llvm.store %next, %pointer atomic release {{alignment = 8 : i64}} : i64, !llvm.ptr
  }}
  return
}}"""


def core_to_core_seconds() -> float | None:
    """Return the seconds that a cache line takes from one core to another: the minimum over samples of many trips,
    measured now, since other work on the cores only adds time. None on a machine with one core, or if the OpenMP pool
    has one thread. Raises BackendError if the backend mlir does not work.
    """
    if len(os.sched_getaffinity(0)) < 2:
        return None
    kernel, line = _kernel(), torch.zeros(16, dtype=torch.int64)
    call, samples, began = BoundCall(kernel.address, [line]), [], time.perf_counter()
    while len(samples) < SAMPLES and (len(samples) < 3 or time.perf_counter() - began < BUDGET_SECONDS):
        line.zero_()
        before = time.perf_counter()
        call(threads=2)
        samples.append((time.perf_counter() - before) / (2 * ROUND_TRIPS))
        if not line[0]:
            return None
    return min(samples)


@functools.cache
def _kernel() -> Kernel:
    return compile_text(_TEXT, "hand_over", libraries=(libgomp_path(),))
