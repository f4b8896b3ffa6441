"""Read the training text of the demo models: the standard library of the running Python.

Files are named by their path below the library's folder. One file in twenty, chosen by a hash of that
name, is held out: no model and no tokenizer ever sees it in training.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_ONE_IN = 20
# Written by the interpreter's own build: they hold the build machine's paths, not library source.
GENERATED = ("_sysconfigdata", "_sysconfig_vars", "config-", "build-details")


@dataclass(frozen=True)
class SourceFile:
    """One module of the standard library. `name` is its path below the library's folder, with forward slashes on every
    system."""

    name: str
    path: Path

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.name.encode()).hexdigest()
        return int(digest, 16) % HELD_OUT_ONE_IN == 0

    def text(self) -> str:
        """Return the file's text with its line ends unchanged."""
        return self.path.read_bytes().decode("utf-8")

    def sha256(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def library_folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def source_files(folder: Path | None = None) -> list[SourceFile]:
    """Return every UTF-8 module of the standard library, by name; installed packages are excluded."""
    folder = folder or library_folder()
    files = (SourceFile(path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py"))
    return sorted((file for file in files if _belongs(file)), key=lambda file: file.name)


def _belongs(file: SourceFile) -> bool:
    parts = file.name.split("/")
    if "site-packages" in parts or "dist-packages" in parts or "__pycache__" in parts:
        return False
    if any(part.startswith(GENERATED) for part in parts):
        return False
    if not file.path.is_file():
        return False  # a folder of that name, or a link to nowhere
    try:
        return bool(file.text())
    except UnicodeDecodeError:
        return False  # the library's own test data for broken encodings


def training_files() -> list[SourceFile]:
    return [file for file in source_files() if not file.held_out]


def held_out_files() -> list[SourceFile]:
    """Return the modules that no training sees; every reported bits-per-byte figure is over these modules."""
    return [file for file in source_files() if file.held_out]


def manifest(files: list[SourceFile] | None = None) -> dict:
    """Return the size, SHA-256 and side of the split of every file, for the model card."""
    files = source_files() if files is None else files
    return {
        "python": platform.python_version(),
        "files": [
            {
                "name": file.name,
                "side": "held_out" if file.held_out else "training",
                "bytes": file.path.stat().st_size,
                "sha256": file.sha256(),
            }
            for file in files
        ],
    }
