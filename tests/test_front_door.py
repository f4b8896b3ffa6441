"""The front door: light to import, and its example runs as it is printed."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import BaseModel

import workbench
from workbench import parts, runs, testing, widgets
from workbench.engine.runner import Runner
from workbench.experiment import experiment
from workbench.experiment import settings as sweep_part
from workbench.kv_cache import eviction as evict

ROOT = Path(__file__).resolve().parents[1]
# Not triton: torch imports it by itself where it is installed.
OPTIONAL = ("torch_mlir", "jupyterlab", "IPython", "ipywidgets", "transformers", "rich", "torch._inductor",
            "workbench.tensor_parallel.graphs")  # fmt: skip

WATCHED = f"""
import sys
import workbench
heavy = sorted({{"torch", "numpy", "tokenizers", "pyarrow", "typer"}} & set(sys.modules))
assert not heavy, heavy
runner = workbench.load("demo", backend="eager")
assert list(runner.stream("x", max_tokens=1))
from workbench.cli import main
assert main(["generate", "x", "--max-tokens", "1", "--set", "backend=eager"]) == 0
optional = sorted({set(OPTIONAL)!r} & set(sys.modules))
assert not optional, optional
workbench.load("demo", backend="inductor")
assert "torch._dynamo" not in sys.modules  # a compiler is imported by the first step that it compiles
"""

SERVER_PACKAGES = ("fastapi", "starlette", "uvicorn", "httptools", "uvloop", "orjson", "prometheus_client", "redis")
WITHOUT_SERVER = f"""
import json, pathlib, sys
sys.modules |= dict.fromkeys({SERVER_PACKAGES})  # importing one raises ModuleNotFoundError
import workbench
from workbench import WorkbenchError, parts, testing, widgets
from workbench.cli import main
for package in (parts, testing, widgets):
    assert [getattr(package, name) for name in dir(package)]
def refused(use):
    try:
        use()
    except WorkbenchError as error:
        return str(error).endswith("pip install 'inference-workbench[serve]'")
assert [name for name in workbench.__all__ if refused(lambda: getattr(workbench, name))] == ["Gateway"]
assert refused(lambda: workbench.serve("demo"))
assert main(["generate", "x", "--max-tokens", "1", "--model", "demo", "--set", "backend=eager"]) == 0
line = '{{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {{"prompt": "x", "max_tokens": 1}}}}'
other = line.replace("completions", "responses").replace("prompt", "input")
other = other.replace("max_", "max_output_").replace('"1"', '"2"')
pathlib.Path("in.jsonl").write_text(line + chr(10) + other)
assert main(["batch", "in.jsonl", "out.jsonl", "--set", "backend=eager"]) == 0
answers = map(json.loads, pathlib.Path("out.jsonl").read_text().splitlines())
assert [each["response"]["status_code"] for each in answers] == [200, 200]
assert main(["serve", "demo"]) != 0
"""


def test_nothing_is_imported_before_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_everything_but_a_server_works_without_the_extra_serve(tmp_path: Path) -> None:
    line = [sys.executable, "-c", WITHOUT_SERVER]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is not installed; pip install 'inference-workbench[serve]'" in done.stderr


def test_the_example_is_six_lines_that_run() -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(workbench, "workbench", globs={})
    source = "".join(part.source for part in example.examples)
    assert len(source.splitlines()) == 6
    assert "runner.stream(" in source and "workbench.load(" in source
    result = doctest.DocTestRunner(verbose=False).run(example)
    assert result.attempted == 5 and result.failed == 0


@pytest.mark.parametrize("package", [workbench, parts, runs, testing, widgets], ids=lambda package: package.__name__)
def test_a_package_offers_its_names_and_no_other(package: ModuleType) -> None:
    assert set(package.__all__) == set(dir(package)) and all(hasattr(package, name) for name in package.__all__)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'laod'"):
        _ = package.laod


def test_parts_are_listed_once_in_order() -> None:
    for names in parts.PARTS.values():
        assert list(names) == sorted(names, key=lambda name: (name[0].islower(), name.lower()))
    listed = [name for names in parts.PARTS.values() for name in names]
    assert sorted(listed) == sorted(parts.__all__)
    assert all(callable(getattr(testing, name)) for name in testing.__all__)


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
