"""Join and wait for process groups of torch.distributed: gloo between CPUs, of several hosts too, NCCL between CUDA
devices."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch

from workbench.errors import WorkbenchError

FOR_EVER = timedelta(days=365)  # limits are those of `Ranks`
POLL_SECONDS = 5e-5  # between looks at whether a call of NCCL has ended
MEETING_SECONDS = 120.0  # at least, for all ranks to come


def distributed_problem(transport: str, size: int) -> str | None:
    """Return why torch.distributed cannot carry `size` ranks by `transport` (gloo, nccl) here; None where it can."""
    if torch.distributed.is_initialized():
        return (
            f"transport {transport}: torch.distributed is in use in this process already; close the other model "
            "(runner.close()), or take transport: shared_memory"
        )
    if transport == "nccl":
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if devices < size or not torch.distributed.is_nccl_available():
            wanted = f"transport nccl: a CUDA device for each of {size} ranks, and here are {devices}"
            return f"{wanted}; take transport: gloo"
    elif not torch.distributed.is_gloo_available():
        return f"transport {transport}: this build of torch has no gloo"
    return None


def open_store(size: int) -> Any:
    """Open the store at which ranks of this host meet, on its loopback; they need its `port`."""
    return torch.distributed.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)


def not_met(error: Exception) -> WorkbenchError:
    """Return what to raise where ranks wait for each other in vain while they start."""
    return WorkbenchError(f"parallel.tensor: the ranks do not meet: {str(error).splitlines()[0]}")


def get_said(store: Any, name: str) -> Any:
    """Return what a rank says in the store, once it does."""
    try:
        return json.loads(store.get(name))
    except RuntimeError as error:
        raise not_met(error) from error


def open_group(rank: int, size: int, timeout: float, store: Any) -> Any:
    """Make torch.distributed's default process group, of gloo, or of NCCL too where there is CUDA; ranks meet at
    `store`.

    Raises:
        WorkbenchError: where they do not all come within `MEETING_SECONDS`, or `timeout` if that is more.
    """
    kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store.set_timeout(timedelta(seconds=max(timeout, MEETING_SECONDS)))
    try:
        torch.distributed.init_process_group(kind, store=store, rank=rank, world_size=size, timeout=FOR_EVER)
    except RuntimeError as error:
        raise not_met(error) from error
    return torch.distributed.group.WORLD


def wait_for(call: Any, seconds: float) -> bool:
    """Wait at most so long for a call of gloo; return whether it has ended, well or not."""
    try:
        call.wait(timedelta(seconds=seconds))
    except RuntimeError:  # the time is over, or the call has failed
        return call.is_completed()
    return True


def poll(call: Any, seconds: float) -> bool:
    """Look at most so long whether a call of NCCL has ended, well or not; return whether it has.

    Its `wait` with a limit would not do: where the limit is over it makes the call itself fail, and the communicator
    with it; without one it returns at once, and the next copy to the CPU waits for ever
    (`WorkNCCL::wait` and `isCompleted` in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
    """
    deadline = time.monotonic() + seconds
    while not call.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def error_of(call: Any) -> RuntimeError | None:
    """Return the error with which a call ended; None where it ended well. What follows on this stream comes after it:
    NCCL looks for errors only where `wait` has a limit, which is never over for a call that has ended."""
    try:
        call.wait(FOR_EVER)
    except RuntimeError as error:
        return error
    return None


def end_process(said: object = "") -> None:
    """End this process as one that failed, without waiting for the threads of torch.distributed, which may wait for a
    rank for ever. torchrun then ends the others."""
    if said:
        print(said, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
