"""Trace in one thread at a time: torch's tracers have global state that two concurrent traces would corrupt."""

from __future__ import annotations

import threading

TRACING = threading.RLock()
