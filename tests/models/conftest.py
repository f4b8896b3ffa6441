from __future__ import annotations

from pathlib import Path

import pytest

from workbench.models.store import models_folder


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of models, and no default but the one that is decided."""
    monkeypatch.setenv("WORKBENCH_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("WORKBENCH_DEFAULT_MODEL")
    return models_folder()
