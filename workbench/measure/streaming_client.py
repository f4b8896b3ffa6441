"""Run as a client process: read server-sent events on stdin, and report the times at which each request's texts arrive.

Its clock is the sender's clock: `time.perf_counter` counts from the same moment in every process of a machine."""

from __future__ import annotations

import json
import sys
import time

PREFIX = b"data: "


def listen() -> dict[str, list]:
    """Read events until the input ends. Return for each request the times of its first and last text, the number of
    texts, and the whole text."""
    seen: dict[str, list] = {}
    for line in sys.stdin.buffer:
        now = time.perf_counter()
        if not line.startswith(PREFIX):
            continue
        chunk = json.loads(line[len(PREFIX) :])
        found = seen.setdefault(chunk["id"], [now, now, 0, ""])
        found[1] = now
        found[2] += 1
        found[3] += chunk["choices"][0]["text"]
    return seen


if __name__ == "__main__":
    print("ready", flush=True)
    json.dump(listen(), sys.stdout)
