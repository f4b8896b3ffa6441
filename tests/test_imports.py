"""The house rule on imports, executed: they point one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("workbench", "compiled_kernels", "experiments", "benchmarks")

# Lower packages first; a module may import its own package and those below it.
ORDER = [
    (
        "workbench.errors",
        "workbench.files",
        "workbench.interrupts",
        "workbench.pixels",
        "workbench.progress",
        "workbench.ray_start",
        "workbench.settings",
        "workbench.stop_button",
        "workbench.waiting",
        "workbench.display",
        "workbench.svg",
    ),
    ("compiled_kernels",),
    ("workbench.batch", "workbench.request", "workbench.response_format", "workbench.trace", "workbench.custom"),
    ("workbench.kv_cache",),
    ("workbench.prompt",),
    ("workbench.model",),
    ("workbench.sampling", "workbench.scheduler"),
    ("workbench.executors",),
    ("workbench.tensor_parallel",),
    ("workbench.speculative", "workbench.inspect"),
    ("workbench.simulate",),
    ("workbench.engine",),
    ("workbench.cluster",),
    ("workbench.agents",),
    ("workbench.offline",),
    ("workbench.serve",),
    ("workbench.experiment",),
    ("workbench.machine",),
    ("workbench.memory",),
    ("workbench.runs",),
    ("workbench.measure",),
    ("workbench.bench",),
    ("workbench.check",),
    ("workbench.economics",),
    ("workbench.gateway",),
    ("workbench.sweep",),
    ("workbench.reports",),
    ("workbench.claims",),
    ("workbench.testing", "workbench.lab"),
    ("workbench.parts",),
    ("workbench.zoo",),
    ("workbench.widgets",),
    ("experiments",),
    ("benchmarks", "tools"),  # of a checkout: only the commands that need one import them
    ("workbench.cli",),
]
INTEGERS = (
    "accounting",
    "budget",
    "cpu_pages",
    "lending",
    "manager",
    "pages",
    "pins",
    "prefix",
    "radix_tree",
)  # of kv_cache: ownership, no tensor
FREE_OF_TORCH = (
    "workbench/files.py",
    "workbench/pixels.py",
    "workbench/request.py",
    "workbench/response_format.py",
    "workbench/display.py",
    *(f"workbench/kv_cache/{name}.py" for name in INTEGERS),
    *(
        path.relative_to(ROOT).as_posix()
        for room in ("trace", "scheduler", "economics", "simulate")
        for path in (ROOT / "workbench" / room).glob("*.py")
    ),
)


def rank(module: str) -> int | None:
    places = [i for i, names in enumerate(ORDER) for n in names if module == n or module.startswith(n + ".")]
    return places[0] if places else None


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def violations(path: Path, module: str) -> list[str]:
    """Return the imports of `path`, taken as module `module`, from a package above its own."""
    mine = rank(module)
    assert mine is not None, f"{module} has no place in ORDER"
    return [f"{module} imports {name}" for name in imports_of(path) if (rank(name) or 0) > mine]


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    if module in ("workbench", "workbench.__main__"):
        return  # the front door names what it offers
    assert violations(path, module) == []
    if path.relative_to(ROOT).parts[0] == "compiled_kernels":
        assert not [name for name in imports_of(path) if name.startswith("workbench")]


@pytest.mark.parametrize("name", FREE_OF_TORCH)
def test_integers_name_no_torch(name: str) -> None:
    assert not [found for found in imports_of(ROOT / name) if found.split(".")[0] == "torch"]


def test_the_check_can_fail(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from workbench.engine.runner import Runner\n")
    found = violations(wrong, "workbench.kv_cache.wrong")
    assert found == ["workbench.kv_cache.wrong imports workbench.engine.runner.Runner"]
