"""A benchmark's record as one dated file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.study.run_folder import strict, write_atomically


def write_dated(record: Mapping[str, Any], folder: Path, name: str) -> Path:
    """`NAME-YYYYmmdd-HHMMSS.json` in `folder` by the record's own `date`, whole or not at all; what is no finite
    number is null in it. Raises WorkbenchError where it cannot be written."""
    date = "".join(character for character in record["date"][:19] if character.isdigit())
    path = folder / f"{name}-{date[:8]}-{date[8:]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(strict(record), indent=2, allow_nan=False) + "\n"
        write_atomically(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise WorkbenchError(f"{path}: the record cannot be written there ({error})") from error
    return path
