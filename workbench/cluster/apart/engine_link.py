"""Exchange messages with an engine's process without blocking: one thread receives, one sends, until the link closes.

coordinator: send --> queue --> connection --> engine        connection --> received, in the coordinator's queue of jobs

A hung process reads nothing and may have written half a message; the coordinator does not block, and kills it.
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
        ended: called in that thread with the reason when the connection has ended.
    """

    def __init__(self, connection: Connection, received: Callable[[object], None], ended: Callable[[str], None]):
        self._connection, self._received, self._ended = connection, received, ended
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._receive, self._send)]
        for thread in self._threads:
            thread.start()

    def send(self, message: object) -> None:
        """Queue a message for sending. If the process has ended, `ended` is called."""
        self._queue.put(bytes(ForkingPickler.dumps(message)))

    def close(self) -> None:
        """End both threads without waiting for the process; unread messages are lost. The connection stays open."""
        self._queue.put(None)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as whole:
            whole.shutdown(socket.SHUT_RDWR)  # wakes blocked reads and writes, which closing the connection would not
        for thread in self._threads:
            thread.join()

    def _receive(self) -> None:
        try:
            while True:
                self._received(self._connection.recv())
        except (EOFError, OSError):
            self._ended("its process has ended")
        except Exception as error:  # the message cannot be unpickled
            self._ended(describe_error(error))

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while (found := self._queue.get()) is not None:
                self._connection.send_bytes(found)
