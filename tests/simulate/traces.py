"""The public traces, where they lie beside the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

AZURE, MOONCAKE = "azure_llm_inference_2023_conv.csv", "mooncake_conversation.jsonl"


def trace(name: str) -> Path:
    """A trace's path, in $WORKBENCH_TRACES or `shared/data/traces` of a folder above; skips where it is not."""
    here = [parent / "shared" / "data" / "traces" for parent in Path(__file__).resolve().parents]
    named = os.environ.get("WORKBENCH_TRACES")
    for folder in ([Path(named)] if named else []) + here:
        if (folder / name).is_file():
            return folder / name
    pytest.skip(f"{name} is not here; get it from its publisher and name its folder in WORKBENCH_TRACES")
