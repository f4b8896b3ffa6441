"""The front door: light to import, and its example runs as it is printed."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

import workbench

ROOT = Path(__file__).resolve().parents[1]
# Not triton: torch imports it by itself where it is installed.
OPTIONAL = ("torch_mlir", "iree", "jupyterlab", "IPython", "ipywidgets", "transformers")

WATCHED = f"""
import sys
import workbench
heavy = sorted({{"torch", "numpy", "tokenizers", "pyarrow", "typer"}} & set(sys.modules))
assert not heavy, heavy
runner = workbench.load("demo", lane="eager")
assert list(runner.stream("x", max_tokens=1))
optional = sorted({set(OPTIONAL)!r} & set(sys.modules))
assert not optional, optional
assert "torch._inductor.compile_fx" not in sys.modules  # the compiler is imported by the lane that uses it
"""


def test_nothing_is_imported_before_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_example_is_six_lines_that_run() -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(workbench, "workbench", globs={})
    source = "".join(part.source for part in example.examples)
    assert len(source.splitlines()) == 6
    assert "runner.stream(" in source and "workbench.load(" in source
    result = doctest.DocTestRunner(verbose=False).run(example)
    assert result.attempted == 5 and result.failed == 0


def test_what_the_front_door_offers() -> None:
    assert set(workbench.__all__) <= set(dir(workbench))
    for name in workbench.__all__:
        assert getattr(workbench, name) is not None
    with pytest.raises(AttributeError, match="module 'workbench' has no attribute 'laod'"):
        _ = workbench.laod  # type: ignore[attr-defined]
