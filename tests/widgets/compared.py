"""Records of runs to compare: one file each, with the settings and figures that a test names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def record(place: Path, name: str, figures: dict[str, float], **settings: Any) -> Path:
    value = {
        "summary": figures, "experiment": {"question": "?", **settings},
        "environment": {"date": "2026-11-21T12:00:00+00:00", "cpu": {"model": "A CPU", "usable_cores": 2}, "gpu": []},
    }  # fmt: skip
    file = place / f"{name}.json"
    file.write_text(json.dumps(value))
    return file
