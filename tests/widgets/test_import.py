"""`import workbench.widgets` is a name and no more; naming every widget brings in nothing that may be missing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

OPTIONAL = ("altair", "plotly", "jupyterlab", "playwright", "triton", "torch_mlir", "transformers", "ray")
PROGRAM = f"""
import json, sys
import workbench.widgets as widgets
first = [name for name in ("torch", "ipywidgets", "anywidget", "pyarrow", "IPython") if name in sys.modules]
there = dir(widgets)
kinds = {{name: callable(getattr(widgets, name)) for name in there}}
print(json.dumps([first, kinds, [name for name in {OPTIONAL} if name in sys.modules]]))
"""


@pytest.mark.processes
def test_widgets_are_fetched_when_named_and_need_no_optional_package() -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    first, kinds, optional = json.loads(said)
    assert first == []
    assert optional == []
    assert {"RunnerThread", "MemoryCalculator", "ModelGraph"} <= set(kinds) and all(kinds.values())
