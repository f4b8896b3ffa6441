"""Write a benchmark's record as one dated file."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.study.run_folder import finite_json, write_atomically


def write_dated_record(record: Mapping[str, Any], folder: Path, name: str) -> Path:
    """Write `NAME-YYYYmmdd-HHMMSS.json` into `folder` by the record's own `date`, atomically.

    Numbers that are not finite become null. A second record of the same second gets `-2`. Raises WorkbenchError where
    the file cannot be written."""
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
