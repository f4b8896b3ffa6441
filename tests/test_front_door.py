"""The front door: light to import, and its example runs as it is printed."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

import workbench
from workbench.engine.runner import Runner
from workbench.experiment import experiment
from workbench.experiment import settings as sweep_part
from workbench.kv_cache import eviction as evict
from workbench.model.hf.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("demo_tools", "testing", "widgets")
# Not triton: torch imports it by itself where it is installed.
OPTIONAL = ("torch_mlir", "jupyterlab", "IPython", "ipywidgets", "transformers")

WATCHED = f"""
import sys
import workbench
heavy = sorted({{"torch", "numpy", "tokenizers", "pyarrow", "typer"}} & set(sys.modules))
assert not heavy, heavy
runner = workbench.load("demo", backend="eager")
assert list(runner.stream("x", max_tokens=1))
optional = sorted({set(OPTIONAL)!r} & set(sys.modules))
assert not optional, optional
assert "torch._inductor.compile_fx" not in sys.modules  # the compiler is imported by the backend that uses it
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
    assert set(workbench.__all__) == set(dir(workbench)), "and nothing else"
    for name in workbench.__all__:
        assert getattr(workbench, name) is not None
    with pytest.raises(AttributeError, match="module 'workbench' has no attribute 'laod'"):
        _ = workbench.laod  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [name for name in workbench.__all__ if name[0].islower() and name not in MODULES])
def test_functions_say_what_they_take_and_show_how(name: str) -> None:
    function = getattr(workbench, name)
    signature = inspect.signature(function)
    assert all(each.annotation is not each.empty for each in signature.parameters.values())
    assert signature.return_annotation is not signature.empty
    text = inspect.getdoc(function) or ""
    assert re.search(rf"workbench\.{name}\(", text, re.M), "an example"


def test_a_cell_can_complete_what_it_asks_for() -> None:
    """Sampling by name, where a text is streamed; and an experiment's fields, whose defaults are stated briefly."""
    sampled = inspect.signature(Runner.stream).parameters
    assert list(sampled)[:3] == ["self", "requests", "temperature"] and sampled["top_p"].default == 1.0
    assert set(workbench.SamplingParameters.model_fields) == set(sampled) - {"self", "requests"}
    fields = inspect.signature(workbench.Experiment).parameters
    assert set(fields) == set(workbench.Experiment.model_fields)
    assert repr(fields["cache"].default) == "CacheConfig()"


def test_an_experiment_is_read_back_from_its_repr() -> None:
    names = vars(experiment) | vars(sweep_part) | vars(evict)
    for file in sorted((ROOT / "experiments").glob("*.yaml")):
        whole = workbench.Experiment.from_file(file)
        known = {kind.__name__: kind for kind in _kinds(whole)}
        assert eval(repr(whole), dict(names), known) == whole
        assert len(repr(whole)) < 0.8 * len(whole.to_yaml()) + 600


def _kinds(value: object) -> Iterator[type]:
    if isinstance(value, BaseModel):
        yield type(value)
        for name in type(value).model_fields:
            yield from _kinds(getattr(value, name))
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ():
        yield from _kinds(inner)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.py")), ids=lambda path: path.name)
def test_a_notebook_uses_front_door_calls_only(path: Path) -> None:
    """Of this project a cell imports `workbench` and its public names; no owner of a runner is called by hand."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    ours = [
        module
        for module in modules
        if module.split(".")[0] in ("workbench", "compiled_kernels", "experiments", "tools")
    ]
    assert set(ours) <= {"workbench", "workbench.widgets"}
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & {"Live", "RunnerThread"}


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 120


def test_the_guide_names_every_family_that_is_read() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "guide" / "python.md").read_text()
    (listed,) = re.findall(r"Families that are read.*?: (.*?)\. What a\s+config", text, re.DOTALL)
    listed = re.sub(r"with\s+(mixtures\s+of\s+experts|recurrent\s+states):", "", listed)
    names = re.findall(r"[a-z0-9_]+", listed)
    assert set(names) == set(FAMILIES) and str(len(FAMILIES)) in text
