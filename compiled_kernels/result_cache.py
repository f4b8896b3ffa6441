"""Store measurements of this machine in one plain JSON file that may be deleted at any time."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import platformdirs
import torch

from compiled_kernels.level import cpuinfo, current_level

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

MAX_ENTRIES = 2000  # entries; older ones, of other versions as a rule, make room
VERSIONS = ("torch", "triton", "torch-mlir")


@dataclass(frozen=True)
class ResultCache:
    """A cache of results by key in `file`. A damaged file counts as empty; if the file cannot be written, nothing is
    stored. Readers always see a complete file; writers wait for one another (if the system has file locks), so that no
    entry is lost."""

    file: Path

    def load(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self.file.read_bytes())["entries"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return {}

    def add(self, key: str, entry: Mapping[str, Any]) -> None:
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with _alone(self.file.with_name(f".{self.file.name}.lock")):
                kept = {**self.load(), key: dict(entry)}
                entries = {"entries": dict(list(kept.items())[-MAX_ENTRIES:])}
                write_atomically(self.file, json.dumps(entries, indent=1).encode())


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold `lock` against other threads and processes."""
    with lock.open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)  # let go when the file is closed, however this ends
        yield


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file completely or not at all, whatever other processes write; files that are open or mapped are not
    changed.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
        os.replace(temporary, file)
    except BaseException:  # interrupts included
        Path(temporary).unlink(missing_ok=True)
        raise


def user_cache_directory() -> Path:
    """Return `$WORKBENCH_CACHE_DIR`, or the user's cache directory for the workbench."""
    given = os.environ.get("WORKBENCH_CACHE_DIR")
    return Path(given or platformdirs.user_cache_dir("inference-workbench", appauthor=False))


def machine_key() -> dict[str, str]:
    """Return the conditions that a measurement depends on: the processor and its level, the GPU, the compilers'
    versions and this package's own code."""
    return {
        "cpu": f"{cpu_model()} x {os.cpu_count()}",
        "level": str(current_level()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "code": own_code(),
        **{name: _version(name) for name in VERSIONS},
    }


def cpu_model() -> str:
    fields = cpuinfo()
    return fields.get("model name") or fields.get("Processor") or platform.processor() or platform.machine()


@functools.cache
def own_code() -> str:  # the hash of this package's sources
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).resolve().parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
