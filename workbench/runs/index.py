"""Cache the listing of a folder of runs, so that the next listing reads only files that have changed.

The folder of runs remains the only source of truth. The index is in the user's cache directory and may be deleted at
any time. A row is valid only while all its files have the same fingerprint: inode, size and times of change. As in
git's index, a file changed less than `STABLE_AFTER_NS` before it was read is not indexed: a second change could leave
the same fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from workbench.files import cache_directory, write_atomically
from workbench.runs.condition import MANIFEST, MARKER
from workbench.runs.locations import RunLocation
from workbench.runs.rows import OUTCOME, POINT

STABLE_AFTER_NS = 2_000_000_000  # nanoseconds; the coarsest clock of a file system (FAT)
MIN_INDEXED_RUNS = 256  # runs; fewer runs are read without an index
MAX_INDEX_FILES = 16  # index files kept, the most recently written ones
INDEXED_FILES = ("experiment.yaml", "environment.json", "summary.json")
METADATA_KEY = b"about"
NO_FILE = (0, 0, 0, 0)


@dataclass(frozen=True)
class RunIndex:
    """The cached listing of a folder.

    `table` has one row per run, with the columns `names`; `structures` has the keys and types from which the columns
    were built. `fingerprints` has the fingerprint of the files by run; `non_records` names JSON files that are not
    records.
    """

    table: pa.Table
    names: list[str]
    structures: Mapping[str, Any]
    fingerprints: Mapping[str, bytes]
    non_records: frozenset[str] = frozenset()


def file_fingerprint(place: RunLocation) -> tuple[bytes, int]:
    """Return a fingerprint of the files of one run, and their latest time of change in nanoseconds."""
    if place.files:
        paths = [f"{place.path}/{name}" if name in place.files else "" for name in INDEXED_FILES]
    else:
        point = place.path.removesuffix(OUTCOME) + POINT if place.path.endswith(f"/{OUTCOME}") else ""
        paths = [place.path, point, ""]
    stats = [_stat(path) if path else NO_FILE for path in paths]
    made = struct.pack("12q2?", *(n for stat in stats for n in stat), MARKER in place.files, MANIFEST in place.files)
    return made, max(max(stat[2:]) for stat in stats)


def _stat(path: str) -> tuple[int, int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return NO_FILE
    return found.st_ino & (2**63 - 1), found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_stable(place: RunLocation, changed: int, now: int) -> bool:
    """Return whether a listing that began at `now` may cache a run that last changed at `changed` (both in
    nanoseconds)."""
    return changed < now - STABLE_AFTER_NS and MARKER not in place.files


def load_index(folder: Path) -> RunIndex | None:
    """Read the index of this folder; None if there is no readable index."""
    try:
        with pa.memory_map(str(_file(folder))) as source:
            table = pa.ipc.open_file(source).read_all()
        table.validate(full=True)
        about = json.loads((table.schema.metadata or {})[METADATA_KEY])
        marks = dict(zip(about["runs"], map(bytes.fromhex, about["marks"]), strict=True))
        others = frozenset(about["others"])
        if table.num_rows != len(marks) - len(others) or table.column_names != about["names"]:
            return None
        return RunIndex(table.replace_schema_metadata(), about["names"], about["structures"], marks, others)
    except (OSError, pa.ArrowException, ValueError, LookupError, TypeError, AttributeError):
        return None


def save_index(folder: Path, index: RunIndex) -> None:
    """Replace the index of this folder. If it cannot be written, later listings only take longer."""
    about = {
        "names": index.names, "structures": index.structures, "runs": [*index.fingerprints],
        "marks": [each.hex() for each in index.fingerprints.values()], "others": sorted(index.non_records),
    }  # fmt: skip
    table = index.table.replace_schema_metadata({METADATA_KEY: json.dumps(about).encode()})
    with suppress(OSError, pa.ArrowException):
        file = _file(folder)
        file.parent.mkdir(parents=True, exist_ok=True)

        def fill(out: Any) -> None:
            with pa.ipc.new_file(out, table.schema) as writer:
                writer.write_table(table)

        write_atomically(file, fill)
        kept = sorted(file.parent.glob("*.arrow"), key=lambda each: each.stat().st_mtime_ns)
        for old in kept[:-MAX_INDEX_FILES]:
            old.unlink(missing_ok=True)


def _file(folder: Path) -> Path:
    """Return the index file of a folder. Each spelling of the folder's path has its own file, because rows contain
    paths that begin with it.
    """
    identity = "\0".join([os.path.realpath(folder), str(folder), _code_fingerprint()])
    key = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return cache_directory() / "runs" / f"{key}.arrow"


@cache
def _code_fingerprint() -> str:
    """Hash the code that builds rows and columns: an index built by other code is not read."""
    here = Path(__file__).parent
    digest = hashlib.sha256(f"{duckdb.__version__} {pa.__version__}".encode())
    for name in ("columns", "index", "listing", "locations", "rows", "../files"):
        digest.update((here / f"{name}.py").read_bytes())
    return digest.hexdigest()
