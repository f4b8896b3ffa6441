"""Parse and format sizes of memory."""

from __future__ import annotations

import re

from workbench.errors import WorkbenchError

UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
MAX_BYTES = 2**60


def parse_bytes(text: str) -> int:
    """Parse `80GB`, `64MiB` or `1000000` into bytes. Raises WorkbenchError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if (
        match is None
        or (unit := match[2].upper()) not in UNITS
        or not 0 < (size := float(match[1]) * UNITS[unit]) < MAX_BYTES
    ):
        raise WorkbenchError(f"memory {text!r}: write a number and a unit, such as 80GB or 64GiB")
    return int(size)


def format_bytes(size: float) -> str:
    """Format a size in bytes for people: `41.9 GB`."""
    for unit, least in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= least:
            return f"{size / least:,.1f} {unit}"
    return f"{size:,.0f} bytes"
