"""Write a run as a folder of plain files, marked INCOMPLETE until all files are complete; or write a benchmark's record
as one dated file.

This file also defines the schemas of its tables. Times are seconds on the runner's clock, not rounded.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from workbench.errors import DISK_FULL_ERRNOS, WorkbenchError, describe_error
from workbench.files import write_atomically
from workbench.interrupts import DeferInterrupts
from workbench.runs.condition import MANIFEST, MARKER, fingerprint, marker_text

MAX_NAME_ATTEMPTS = 100
WRITABLE_HINT = "name a folder that can be written with --out"


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()))


TEXT, COUNT, SECONDS, NUMBER = pa.string(), pa.int64(), pa.float64(), pa.float64()

SCHEMAS = {
    "requests.parquet": _schema(
        request_id=TEXT,
        sample=COUNT,
        arrival=SECONDS,
        submitted=SECONDS,
        first_scheduled=SECONDS,
        first_token=SECONDS,
        finished=SECONDS,
        prompt_tokens=COUNT,
        cut_tokens=COUNT,
        tenant=TEXT,
        priority=COUNT,
        deadline=SECONDS,
        output_tokens=COUNT,
        cached_tokens=COUNT,
        computed_tokens=COUNT,
        restored_tokens=COUNT,
        written_tokens=COUNT,
        shared_pages=COUNT,
        finish_reason=TEXT,
        error=TEXT,
        num_preemptions=COUNT,
        output_text=TEXT,
        token_ids=pa.list_(pa.int64()),
    ),
    "steps.parquet": _schema(
        time=SECONDS,
        replica=COUNT,
        step=COUNT,
        phase=TEXT,
        requests=COUNT,
        prefill_tokens=COUNT,
        decode_tokens=COUNT,
        pages_used=COUNT,
        kv_bytes=COUNT,
        wall_seconds=SECONDS,
        forward_seconds=SECONDS,
        telemetry_seconds=SECONDS,
        predicted_flops=NUMBER,
        predicted_bytes=NUMBER,
        pages_idle=COUNT,
        compiles=COUNT,
        context_tokens=COUNT,
        drafted_tokens=COUNT,
        accepted_tokens=COUNT,
        draft_seconds=SECONDS,
        kernel_seconds=SECONDS,
        padding_rows=COUNT,
    ),
    "tokens.parquet": _schema(
        request_id=TEXT, sample=COUNT, index=COUNT, token_id=COUNT, time=SECONDS, logprob=NUMBER, step=COUNT
    ),
    "verifications.parquet": _schema(
        time=SECONDS,
        step=COUNT,
        request_id=TEXT,
        sample=COUNT,
        drafted=COUNT,
        accepted=COUNT,
        token_ids=pa.list_(pa.int64()),
    ),  # fmt: skip
    "spans.parquet": _schema(time=SECONDS, step=COUNT, sequence=TEXT, start=COUNT, tokens=COUNT, drafted=COUNT),
    "inputs.parquet": _schema(
        event=COUNT, time=SECONDS, step=COUNT, kind=TEXT, sequence=TEXT, tokens=COUNT, reason=TEXT
    ),
    "decisions.parquet": _schema(
        time=SECONDS, step=COUNT, request_id=TEXT, sample=COUNT, kind=TEXT, action=TEXT, reason=TEXT
    ),
}


def table_of(rows: Sequence[Mapping], schema: pa.Schema | None = None) -> pa.Table:
    """Build a table from rows: the schema's columns always, then further columns in order of appearance."""
    names = list(schema.names) if schema else []
    names = list(dict.fromkeys([*names, *(key for row in rows for key in row)]))
    columns = {}
    for name in names:
        kind = schema.field(name).type if schema and name in schema.names else None
        columns[name] = _column(name, [row.get(name) for row in rows], kind)
    return pa.table(columns)


def _column(name: str, values: list, kind: pa.DataType | None) -> pa.Array:
    try:
        return pa.array(values, type=kind)
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot encode
        plain = [v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for v in values]
        return pa.array(plain, type=kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise WorkbenchError(f"column {name!r}: {error}") from error


class RunFolder:
    """A run folder that is being written. Each file appears atomically; `finish` makes the folder a complete record.

    created -> INCOMPLETE [files ...] -> finish: manifest.json, then INCOMPLETE is removed"""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, parent: Path | str, name: str) -> RunFolder:
        """Create a new folder `NAME-YYYYmmdd-HHMMSS-xxxx` in `parent`, with a unique name.

        The folder is created under a hidden name and renamed with the marker inside, so that it is never visible
        without the marker. Call this before any work. Raises WorkbenchError if the folder cannot be written.
        """
        if not name or name != Path(name).name or name.startswith("."):
            raise WorkbenchError(f"run name {name!r}: must be a folder name without '/' or a leading '.'")
        parent = Path(parent)
        with _writable(parent):
            parent.mkdir(parents=True, exist_ok=True)
            for _ in range(MAX_NAME_ATTEMPTS):
                if path := _make(parent, f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"):
                    return cls(path)
        raise WorkbenchError(f"output folder {parent}: no name is free for run {name!r}; use another folder")

    def abandon(self, reason: str = "") -> None:
        """Mark the folder as abandoned, with the reason.

        On a full disk the existing marker is overwritten in place, which needs no space."""
        marker, text = self.path / MARKER, marker_text(reason or "it was interrupted")
        if marker.is_file():
            with suppress(OSError):  # report the run's error, not this one
                try:
                    write_atomically(marker, lambda file: file.write(text))
                except OSError:
                    with marker.open("r+b", buffering=0) as file:
                        file.write(text)

    def write_text(self, name: str, text: str) -> None:
        # Output text may have a lone surrogate: escaped, it does not prevent writing the rest of the file.
        self._write(name, lambda file: file.write(text.encode("utf-8", "backslashreplace")))

    def write_bytes(self, name: str, content: bytes) -> None:
        self._write(name, lambda file: file.write(content))

    def write_json(self, name: str, value: object, indent: int | None = 2) -> None:
        """Write `value` as strict JSON: non-finite numbers become null."""
        text = json.dumps(finite_json(value), indent=indent, ensure_ascii=False, allow_nan=False)
        self.write_text(name, text + "\n")

    def write_table(self, name: str, rows: Sequence[Mapping], schema: pa.Schema | None = None) -> None:
        """Write rows as a Parquet file, with `schema` or else the schema defined for this file name; columns beyond the
        schema are kept."""
        table = table_of(rows, schema or SCHEMAS.get(name))
        self._write(name, lambda file: pq.write_table(table, file))

    def finish(self) -> Path:
        """Write the manifest, then remove the marker: the folder is now a record."""
        with _writable(self.path):
            present = sorted(p for p in self.path.glob("[!.]*") if p.is_file())
            files = {p.name: fingerprint(p) for p in present if p.name not in (MARKER, MANIFEST)}
            self.write_json(MANIFEST, {"files": files})
            _sync_folder(self.path)  # file names first: a power cut must not leave a folder without marker and files
            (self.path / MARKER).unlink()
            _sync_folder(self.path)
        return self.path

    def _write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        if name == MARKER or name != Path(name).name or name.startswith("."):
            raise ValueError(f"a run folder's file needs a plain name of its own, not {name!r}")
        with _writable(self.path):
            if not (self.path / MARKER).is_file():
                raise WorkbenchError(f"run folder {self.path}: finished or gone; make a new one to write {name}")
            write_atomically(self.path / name, fill)


@contextmanager
def writing(parent: Path | str, name: str) -> Iterator[RunFolder]:
    """Create a run folder in `parent` to write within the `with` block; an exception or interrupt marks it as
    abandoned.
    """
    with DeferInterrupts() as held:
        folder = RunFolder.create(parent, name)
        try:
            with held.allow():
                yield folder
        except BaseException as error:
            folder.abandon("" if isinstance(error, KeyboardInterrupt) else describe_error(error))
            raise


def _make(parent: Path, name: str) -> Path | None:
    """Create `parent/name` with the marker inside; None if that name is taken."""
    path = parent / name
    hidden = parent / f".incomplete-{name}-{secrets.token_hex(8)}"
    try:
        hidden.mkdir()
        write_atomically(hidden / MARKER, lambda file: file.write(marker_text()))
        _sync_folder(hidden)
        if os.path.lexists(path):
            return None
        try:
            os.rename(hidden, path)  # fails if another run's folder has the name: it is never empty
        except OSError:
            if os.path.lexists(path):
                return None
            raise
        _sync_folder(parent)
        return path
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "make room there, or name another with --out" if error.errno in DISK_FULL_ERRNOS else WRITABLE_HINT
        raise WorkbenchError(f"output folder {folder}: cannot be written ({reason}); {remedy}") from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def finite_json(value: object) -> object:
    """Return `value` as strict JSON values: non-finite numbers become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_json(inner) for inner in value]
    return value


def write_dated_record(record: Mapping[str, Any], folder: Path, name: str) -> Path:
    """Write `NAME-YYYYmmdd-HHMMSS.json` into `folder` atomically, dated by the record's `date`.

    Non-finite numbers become null. A second record of the same second gets the suffix `-2`. Raises WorkbenchError if
    the file cannot be written.
    """
    date = "".join(character for character in record["date"][:19] if character.isdigit())
    stem = f"{name}-{date[:8]}-{date[8:]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(finite_json(record), indent=2, allow_nan=False) + "\n"
        for number in itertools.count(1):
            path = folder / f"{stem}{'' if number == 1 else f'-{number}'}.json"
            with contextlib.suppress(FileExistsError):
                write_atomically(path, lambda file: file.write(text.encode()), replace=False)
                return path
        raise AssertionError("numbers do not end")
    except OSError as error:
        raise WorkbenchError(f"{folder / stem}.json: the record cannot be written there ({error})") from error
