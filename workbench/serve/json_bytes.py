"""Write and read JSON as bytes: by orjson where the extra `serve` is installed, else by pydantic."""

from __future__ import annotations

from typing import Any

import pydantic_core

try:
    import orjson
except ModuleNotFoundError:
    orjson = None


def dumps(value: Any) -> bytes:
    """Return a value as JSON, in bytes."""
    return pydantic_core.to_json(value) if orjson is None else orjson.dumps(value)


def loads(raw: bytes) -> Any:
    """Return the value of a JSON text; raise ValueError for a text that is not JSON."""
    return pydantic_core.from_json(raw) if orjson is None else orjson.loads(raw)
