"""Store compiled code on disk by content: a key names an entry, an entry names its files by their checksums.

    <directory>/<key>.json           {"files": {"library": "<sha256>.so", "stages": "<sha256>.json"}}
    <directory>/files/<sha256>.so    written to a temporary name, then moved into place, so that readers see whole files

A file that does not match its checksum counts as absent, so a damaged entry is built again. Processes that build the
same entry at once write the same names; the last move wins, and each file is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from compiled_kernels.result_cache import user_cache_directory, write_atomically


def cache_directory() -> Path:
    return user_cache_directory() / "mlir"


def key_of(**content: object) -> str:
    """Return the cache key of what the compilers make of `content`: the SHA-256 of `content` and the compilers'
    versions. `content` must include the processor.
    """
    text = json.dumps({**content, "compilers": compilers()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class ArtifactCache:
    """A cache of compiled code on disk: `directory` has the entries, each of a few named files."""

    directory: Path

    def load(self, key: str) -> dict[str, Path] | None:
        """Return the entry's files by name, each verified by its checksum; None if the entry is missing or damaged and
        must be built.
        """
        try:
            files = json.loads((self.directory / f"{key}.json").read_text())["files"]
            paths = {name: self.directory / "files" / file for name, file in files.items()}
            whole = all(_checksum(path) == path.stem for path in paths.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return paths if whole and paths else None

    def store(self, key: str, files: Mapping[str, tuple[bytes, str]]) -> dict[str, Path]:
        """Store `files`, as name -> (content, suffix), under `key`; return their paths. May raise OSError."""
        paths = {}
        for name, (content, suffix) in files.items():
            paths[name] = self.directory / "files" / (hashlib.sha256(content).hexdigest() + suffix)
            write_atomically(paths[name], content)
        entry = {"files": {name: path.name for name, path in paths.items()}}
        write_atomically(self.directory / f"{key}.json", json.dumps(entry, indent=1).encode())
        return paths

    def link_recipe(self, recipe: str, key: str) -> None:
        """Store that the recipe, a hash that is cheap to compute, was compiled to the entry `key`. May raise
        OSError.
        """
        write_atomically(self.directory / f"{recipe}.name", key.encode())

    def key_of_recipe(self, recipe: str) -> str | None:
        """Return the key of the entry that a recipe was compiled to; None if it is unknown."""
        try:
            key = (self.directory / f"{recipe}.name").read_text()
        except (OSError, ValueError):
            return None
        return key if len(key) == 64 and set(key) <= set("0123456789abcdef") else None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def compilers() -> dict[str, str]:
    return {name: version_of(name) for name in ("torch-mlir", "torch")}


def version_of(name: str) -> str:
    """Return the installed version of a package; empty if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
