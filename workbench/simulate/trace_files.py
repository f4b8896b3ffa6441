"""Read recorded traffic: Azure's CSV (Patel et al., Splitwise, ISCA 2024) and Mooncake's JSON lines (Qin et al., FAST
2025).

An invalid line raises one error that names the file, the line and the expected form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from workbench.errors import WorkbenchError
from workbench.files import UnreadableText, read_json
from workbench.simulate.arrival import BLOCK_TOKENS, Arrival

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
MOONCAKE_LINE = '{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one a 512 tokens]}'

MAX_TOKENS_PER_REQUEST = (
    2**24
)  # beyond any context; a number larger than that is an error, and its prompt would fill the memory


def read_trace(path: Path | str) -> Iterator[Arrival]:
    """Yield the requests of a trace file in its order, the first at second 0. The first line decides the format.

    An output of 0 tokens counts as 1: computing a prompt yields a token."""
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            yield from _lines(file, str(path))
    except (OSError, UnicodeDecodeError) as error:
        fault = type(error).__name__
        raise WorkbenchError(f"trace {path}: cannot be read ({fault}); give a CSV or JSONL file") from None


def _lines(file: TextIO, path: str) -> Iterator[Arrival]:
    first = file.readline().strip()
    if first == AZURE_HEADER:
        read, begin, right = _azure, 2, f"{AZURE_HEADER}, as in 2023-11-16 18:15:46.6805900,374,44"
    elif first.startswith("{"):
        read, begin, right = _mooncake, 1, MOONCAKE_LINE
        file.seek(0)
    else:
        raise WorkbenchError(
            f"{path}, line 1: {_short(first)} begins no trace; begin with {AZURE_HEADER} or {MOONCAKE_LINE}"
        )
    began = last = None
    for number, line in enumerate(file, begin):
        if not line.strip():
            continue
        try:
            time, prompt, output, blocks = read(line.lstrip("\ufeff"))
            if last is not None and time < last:
                raise ValueError(f"its time is {last - time:.3f} s before the line above")
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            fault = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise WorkbenchError(f"{path}, line {number}: {fault} in {_short(line)}; write {right}") from None
        began, last = time if began is None else began, time
        session = str(blocks[min(1, len(blocks) - 1)]) if blocks else ""  # the first block is shared by all
        yield Arrival(time - began, prompt, max(1, output), session, "", blocks)
    if last is None:
        raise WorkbenchError(f"{path}: has no request; write {right}")


def _azure(line: str) -> tuple[float, int, int, tuple[int, ...]]:
    fields = line.strip().split(",")
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields, not 3,")
    when, prompt, output = fields
    at = datetime.fromisoformat(when.strip())
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp(), _tokens(prompt, 1), _tokens(output, 0), ()


def _mooncake(line: str) -> tuple[float, int, int, tuple[int, ...]]:
    try:
        entry: Any = read_json(line.strip())
    except UnreadableText as error:
        raise ValueError(error.reason) from None
    if not isinstance(entry, dict):
        raise ValueError(f"{type(entry).__name__}, not a mapping,")
    time = entry["timestamp"]
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time < math.inf:
        raise ValueError(f"timestamp {time!r} is not a number of 0 or more")
    prompt, output, blocks = _tokens(entry["input_length"], 1), _tokens(entry["output_length"], 0), entry["hash_ids"]
    wanted = -(-prompt // BLOCK_TOKENS)
    if not isinstance(blocks, list) or len(blocks) != wanted or not all(type(block) is int for block in blocks):
        raise ValueError(f"hash_ids must be a list of {wanted} ids for {prompt} tokens,")
    return time / 1000, prompt, output, tuple(blocks)


def _tokens(value: object, least: int) -> int:
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_TOKENS_PER_REQUEST:
        raise ValueError(f"{value!r:.60} is not a count from {least} to {MAX_TOKENS_PER_REQUEST:,}")
    return value


def _short(line: str) -> str:
    text = line.strip()
    return repr(text if len(text) <= 80 else text[:77] + "...")
