"""Join and wait for process groups of torch.distributed: gloo between CPUs, also of several hosts, NCCL between CUDA
devices.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch

from workbench.errors import WorkbenchError

FOR_EVER = timedelta(days=365)  # `Ranks` has its own limits
POLL_SECONDS = 5e-5  # seconds between checks whether an NCCL call has ended
MEETING_SECONDS = 120.0  # minimum time for all ranks to join


def distributed_problem(transport: str, size: int) -> str | None:
    """Return why torch.distributed cannot connect `size` ranks by `transport` (gloo, nccl) on this machine; None if it
    can.
    """
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
    """Open the store at which the ranks of this host meet, on its loopback interface; the ranks need its `port`."""
    return torch.distributed.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)


def not_met(error: Exception) -> WorkbenchError:
    """Return the error for ranks that did not meet at startup before the time limit."""
    return WorkbenchError(f"parallel.tensor: the ranks do not meet: {str(error).splitlines()[0]}")


def get_said(store: Any, name: str) -> Any:
    """Wait until a rank's message `name` is in the store, and return it."""
    try:
        return json.loads(store.get(name))
    except RuntimeError as error:
        raise not_met(error) from error


def open_group(rank: int, size: int, timeout: float, store: Any) -> Any:
    """Create torch.distributed's default process group, with gloo, and also NCCL if there is CUDA; ranks meet at
    `store`.

    Raises:
        WorkbenchError: if a rank does not join within the larger of `MEETING_SECONDS` and `timeout`.
    """
    kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store.set_timeout(timedelta(seconds=max(timeout, MEETING_SECONDS)))
    try:
        torch.distributed.init_process_group(kind, store=store, rank=rank, world_size=size, timeout=FOR_EVER)
    except RuntimeError as error:
        raise not_met(error) from error
    return torch.distributed.group.WORLD


def wait_for(call: Any, seconds: float) -> bool:
    """Wait for a gloo call up to a time limit; return whether it has ended (successfully or not)."""
    try:
        call.wait(timedelta(seconds=seconds))
    except RuntimeError:  # the time limit has passed, or the call has failed
        return call.is_completed()
    return True


def poll(call: Any, seconds: float) -> bool:
    """Poll an NCCL call up to a time limit; return whether it has ended (successfully or not).

    Its `wait` is unsuitable: with a time limit, passing the limit makes the call and its communicator fail; without one
    it returns at once, and the next copy to the CPU waits for ever
    (`WorkNCCL::wait` and `isCompleted` in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
    """
    deadline = time.monotonic() + seconds
    while not call.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def error_of(call: Any) -> RuntimeError | None:
    """Return the error of an ended gloo or NCCL call; None if it succeeded. Later work on this stream waits for the
    call. NCCL checks for errors only in a `wait` with a time limit, which does not expire for an ended call.
    """
    try:
        call.wait(FOR_EVER)
    except RuntimeError as error:
        return error
    return None


def end_process(said: object = "") -> None:
    """End this process as failed, after printing `said`. It does not wait for torch.distributed's threads, which may
    wait for a rank for ever. torchrun then ends the other ranks.
    """
    if said:
        print(said, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
