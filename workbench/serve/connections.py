"""Bound the cost of connections: HTTP connections with a deadline for every action that is expected of a client.

    silent --first byte--> header --complete--> body, answer --sent--> silent
    idle_seconds           header_seconds       body: the route's; unread answer: send_seconds

Deadlines are absolute: a byte now and then does not extend them. They are checked together once a second, so that ten
thousand connections need no timers.
"""

from __future__ import annotations

import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from workbench.serve.config import ServerSettings

READ_BYTES = 1 << 16  # minimum that a client must read in `send_seconds`; as many are sent ahead


class BoundedConnection(HttpToolsProtocol):
    """An HTTP connection with deadlines: `check` closes it when its client has missed one.

    uvicorn's own limit starts with the first answer, and restarts with every byte. Its close waits without limit until
    the client has read all sent bytes.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._silent_since: float | None = time.monotonic()
        self._header_since: float | None = None
        self._unread: tuple[float, int] | None = None  # (time when the client last read enough, bytes unread then)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_since = time.monotonic()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._header_since = None

    def check(self, settings: ServerSettings, now: float) -> None:
        """Close the connection if a deadline has passed; cut it off if closing would wait for the client."""
        is_idle = self.cycle is None or self.cycle.response_complete
        is_closing = self.transport.is_closing()
        self._silent_since = (self._silent_since or now) if is_idle else None
        if self._is_unread(is_idle or is_closing, settings.send_seconds, now):
            self.transport.abort()
        elif is_idle and not is_closing:
            began, most = self._silent_since or now, settings.idle_seconds
            if self._header_since is not None:
                began, most = max(began, self._header_since), settings.header_seconds
            if now - began > most:
                self.transport.close()

    def _is_unread(self, is_sent: bool, seconds: float, now: float) -> bool:
        """Return whether the client has read less than `READ_BYTES` of its pending bytes for `seconds`.

        `is_sent`: no bytes will be added; otherwise pending bytes count only while they block the answer.
        """
        size = self.transport.get_write_buffer_size()
        if size == 0 or not (is_sent or self.flow.write_paused):
            self._unread = None
        elif self._unread is None or self._unread[1] - size >= READ_BYTES:
            self._unread = now, size
        return self._unread is not None and now - self._unread[0] > seconds
