"""Talk to the process of an engine without waiting for it: one thread receives, one sends, and both end with the link.

coordinator: send --> queue --> connection --> engine        connection --> received, in the coordinator's queue of jobs

A process that hangs reads nothing, and may have written half a message; the coordinator goes on, and ends it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

from workbench.errors import describe_error


class EngineLink:
    """The coordinator's end of a connection.

    Args:
        connection: to the process.
        received: called in a thread with each message.
        ended: called in that thread with the reason when nothing more will come.
    """

    def __init__(self, connection: Connection, received: Callable[[object], None], ended: Callable[[str], None]):
        self._connection, self._received, self._ended = connection, received, ended
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._receive, self._send)]
        for thread in self._threads:
            thread.start()

    def send(self, message: object) -> None:
        """Send a message, soon. If the process has ended, `ended` is called next."""
        self._queue.put(bytes(ForkingPickler.dumps(message)))

    def close(self) -> None:
        """End both threads, whatever the process does; what it has not read is lost. It closes no connection."""
        self._queue.put(None)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as whole:
            whole.shutdown(socket.SHUT_RDWR)  # wakes what reads and writes; a connection that is closed does not
        for thread in self._threads:
            thread.join()

    def _receive(self) -> None:
        try:
            while True:
                self._received(self._connection.recv())
        except (EOFError, OSError):
            self._ended("its process has ended")
        except Exception as error:  # a message that cannot be read
            self._ended(describe_error(error))

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while (found := self._queue.get()) is not None:
                self._connection.send_bytes(found)
