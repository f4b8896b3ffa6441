"""Trace in one thread at a time: torch's tracers keep their state for the whole process, and two would spoil it."""

from __future__ import annotations

import threading

TRACING = threading.RLock()
