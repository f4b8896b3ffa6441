"""The latency of a cache line from one core to another, by which a machine's core placement is recognised.

Two threads hand a number back and forth through one cache line. On a processor of several core complexes, cores of one
complex hand it over in some 20 ns and those of two in some 100 ns; a virtual machine's cores are moved between such
places, and with them what memory and shared caches give. So rounds of a measurement are compared within one placement.
"""

from __future__ import annotations

import functools
import os
import time

import torch

from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir.invoke import BoundCall, libgomp_path

ROUND_TRIPS = 100  # there and back again, in one sample
SAMPLES = 101
BUDGET_SECONDS = 0.5  # with other work on the cores a trip can take a turn of the scheduler

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
    """Return the seconds in which a cache line goes from one core to another: the least of samples of many trips, taken
    now, since other work on the cores only adds to it. None on a machine of one core, or where the OpenMP pool has one
    thread. Raises BackendError where the backend mlir does not work."""
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
