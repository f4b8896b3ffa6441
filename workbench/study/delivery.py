"""Delivery of a text to a client: in one message, or in one message for every token that adds text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from workbench.errors import WorkbenchError
from workbench.study.streaming_workload import Delivery
from workbench.trace.events import Decoded, Event, Finished

SCRIPT = Path(__file__).with_name("streaming_client.py")


class StreamingClient:
    """A client in a process of its own. Once closed, `received` has its notes by request."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._pipe = cast(IO[bytes], self._process.stdin)
        self.received: dict[str, list[Any]] = {}
        if cast(IO[bytes], self._process.stdout).readline().strip() != b"ready":
            self._process.kill()
            raise WorkbenchError("the client's process did not start; see above for what it said")

    def send(self, name: str, text: str, reason: str | None) -> None:
        """Send one server-sent event, as `/v1/completions` streams them."""
        chunk = {
            "id": name, "object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": reason}]
        }  # fmt: skip
        self._pipe.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def __enter__(self) -> StreamingClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        said = self._process.communicate()[0]
        if kind is None:
            self.received = json.loads(said)


def deliver(event: Event, delivery: Delivery, client: StreamingClient) -> None:
    """Send the client what an event adds. With `stream` the last piece carries the finish reason."""
    if isinstance(event, Finished):
        client.send(event.request_id, event.text if delivery == "stream" else event.output_text, event.reason)
    elif isinstance(event, Decoded) and delivery == "stream" and event.text:
        client.send(event.request_id, event.text, None)
