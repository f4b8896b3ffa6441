"""Wait for work of other threads, while the notebook's widgets keep answering.

A cell that waits keeps ipykernel from reading messages: a button pressed meanwhile would act when the wait is over.
Here the waiting thread reads them. Those of widgets are handled at once; all others, such as requests to run cells, are
put back in their order when the wait ends.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from workbench.progress import notebook_kernel

SERVE_INTERVAL_SECONDS = 0.02  # between two looks for messages
COMM_MESSAGE_TYPES = ("comm_open", "comm_msg", "comm_close")
_Serve = Callable[[], object]

_serving: list[_Serve] = []  # by the main thread, which may wait again while it handles a message


def wait_and_serve(wait: Callable[[float | None], bool], seconds: float | None = None) -> bool:
    """Wait until `wait` returns True or `seconds` have passed; return whether it returned True. Widgets are served
    meanwhile.

    Args:
        wait: waits at most the given seconds (None: without limit) and returns whether the awaited work is done.
        seconds: time limit; None for no limit.
    """
    stream = _shell_stream()
    if stream is None:
        return wait(seconds)
    end = float("inf") if seconds is None else time.monotonic() + seconds
    with _served(notebook_kernel(), stream) as serve:
        while not wait(max(0.0, min(SERVE_INTERVAL_SECONDS, end - time.monotonic()))):
            if time.monotonic() >= end:
                return False
            serve()
    return True


def _shell_stream() -> Any:
    """Return the stream by which the kernel hears of messages, or None outside a notebook and in other threads."""
    kernel = notebook_kernel()
    if kernel is None or threading.current_thread() is not threading.main_thread():
        return None
    if (channel := getattr(kernel, "shell_channel_thread", None)) is not None:  # ipykernel 7 reads in a thread
        return channel.manager.get_shell_channel_to_subshell_pair(None).to_stream
    return getattr(kernel, "shell_stream", None)


@contextmanager
def _served(kernel: Any, stream: Any) -> Iterator[_Serve]:
    """Read the kernel's messages here; each call of what is given serves those that have come."""
    if _serving:  # while a message is handled: the wait outside keeps what is to be put back
        yield _serving[0]
        return
    put_back, others = stream._recv_callback, list[Any]()
    try:
        stream.on_recv(lambda frames: _handle(kernel, frames) or others.append(frames), copy=False)
        _serving.append(lambda: stream.flush(1))  # zmq.POLLIN
        yield _serving[0]
    finally:
        _serving.clear()
        # At once: the loop may be about to read what came since the last look, which is to be handled after these.
        for frames in others:
            if inspect.isawaitable(handling := put_back(frames)):
                asyncio.ensure_future(handling)
        stream.on_recv(put_back, copy=False)


def _handle(kernel: Any, frames: Any) -> bool:
    """Handle a message where it is a widget's; return whether it was.

    The browser sends the next change of a slider when it hears that the kernel is idle after the last; what a callback
    prints belongs to its message, as when no cell runs.
    """
    session = kernel.session
    try:
        idents, message = session.feed_identities(frames, copy=False)
        if session.deserialize(message, content=False, copy=False)["msg_type"] not in COMM_MESSAGE_TYPES:
            return False
        comm = session.deserialize(message, content=True, copy=False)
    except Exception:  # not a message: the kernel says so
        return False
    cell_ident, cell = kernel._parent_ident["shell"], kernel.get_parent("shell")
    kernel.set_parent(idents, comm, "shell")
    try:
        kernel._publish_status("busy", "shell")
        kernel.shell_handlers[comm["msg_type"]](None, idents, comm)
    except Exception:
        kernel.log.error("Exception in message handler:", exc_info=True)  # as the kernel does
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            kernel._publish_status("idle", "shell")
        finally:  # an interrupt may come here, and what the kernel says next is of the cell
            kernel.set_parent(cell_ident, cell, "shell")
        kernel._publish_status("busy", "shell")
    return True
