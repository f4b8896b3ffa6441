"""The shape of the source: imports point one way and in no circle, a class name stands once, a name is read, no room
grows.

Guards of words, docstrings, pages and figures are `python -m tools.lint` (`make lint`).
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from math import inf
from pathlib import Path

from tools.structure import (
    PACKAGES,
    circles,
    duplicated_classes,
    imported_names,
    imports,
    imports_from_elsewhere,
    methods_of_classes,
    modules,
)
from tools.weight import CORE, Weight, by_room, room_of, too_heavy, weights

READERS = ("benchmarks", "docs", "experiments", "notebooks", "tools", *PACKAGES)  # whose texts may read a name
UNREAD = "F401,F841,B007,ARG001,ARG002,ARG003,ARG004"  # ruff's rules: imports, variables, parameters
NAMED = r"^ *(?:async )?(?:def|class) (\w+)|^(\w+)(?:: .*)? = |self\.(\w+)(?:: .*)? = "
# Of names that stand once: parts of names made at run time, what other libraries call, and what users and tests call.
CALLED = (
    r"_?of_\w+|_\w+_|handle_\w+|redirect_request|format_help|writelines|is_node_supported|_template_name_default|"
    r"test_it_\w+|borrowed_by|logit_lens|is_prime|factorial|greatest_common_divisor|"
    r"num_on|pages_lent|int8_reference|markup_errors|parse_calls"
)
ALLOWED = ("`submodules`", "`draft`")  # a parameter of another library's; sampling, which is being rebuilt

# Lower floors first; a module may import those of its own floor and of the floors below it.
FLOORS = [
    line.split()
    for line in """
workbench.errors workbench.files workbench.interrupts workbench.own_folder workbench.pixels workbench.progress \
workbench.ray_start workbench.settings workbench.stop_button workbench.units workbench.waiting workbench.display \
workbench.svg workbench.figures workbench.lazy
compiled_kernels
workbench.batch workbench.models workbench.request workbench.response_format workbench.trace workbench.custom
workbench.kv_cache
workbench.prompt
workbench.constrained
workbench.model
workbench.oracle
workbench.sampling workbench.scheduler
workbench.executors
workbench.decoding
workbench.tensor_parallel
workbench.speculative workbench.inspect
workbench.simulate
workbench.engine
workbench.cluster
workbench.agents
workbench.serve
workbench.offline
workbench.experiment
workbench.machine
workbench.memory
workbench.runs
workbench.measure
workbench.bench
workbench.check
workbench.economics
workbench.gateway
workbench.sweep
workbench.reports
workbench.testing workbench.lab
workbench.parts
workbench.claims
workbench.widgets
experiments
benchmarks tools
workbench.cli
""".strip().splitlines()
]
FRONT = ("workbench", "workbench.__main__")  # the front door names what it offers
INTEGERS = "accounting budget cpu_pages manager pages pins prefix radix_tree"  # of kv_cache: ownership
FREE_OF_TORCH = [
    *(f"workbench.{name}" for name in ("files", "pixels", "request", "response_format", "display", "units")),
    *(f"workbench.kv_cache.{name}" for name in INTEGERS.split()),
    "workbench.cluster.apart.lending",
    *(f"workbench.{room}" for room in ("trace", "scheduler", "economics", "simulate", "models")),
]
MODULES = modules(packages=(*PACKAGES, "experiments", "benchmarks"))
LIBRARY = modules()


def floor(module: str) -> int | None:
    """Return the number of a module's floor; None for a module that is not ours."""
    places = [n for n, names in enumerate(FLOORS) for name in names if f"{module}.".startswith(f"{name}.")]
    return places[0] if places else None


def upward(files: dict[str, Path]) -> list[str]:
    """Return imports from a higher floor, modules that stand on none, and imports of workbench by kernels."""
    found = []
    for module, path in files.items():
        own = floor(module)
        names = imported_names(path) if module not in FRONT else ()
        found += [f"{module} has no floor"] if own is None and module not in FRONT else []
        found += [f"{module} imports {name}" for name in names if own is not None and (floor(name) or 0) > own]
        if module.startswith("compiled_kernels"):
            found += [f"{module} imports {name}" for name in names if name.startswith("workbench")]
    return found


def test_imports_point_one_way() -> None:
    assert upward(MODULES) == []


def test_ownership_and_schedules_name_no_torch() -> None:
    for name in FREE_OF_TORCH:
        files = [path for module, path in LIBRARY.items() if f"{module}.".startswith(f"{name}.")]
        assert files, f"{name}: no such module"
        wrong = [path for path in files if any(each.split(".")[0] == "torch" for each in imported_names(path))]
        assert wrong == []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside of functions, and for types alone, are counted too."""
    assert circles(imports(LIBRARY)) == []


def test_a_public_class_name_stands_once() -> None:
    assert duplicated_classes(LIBRARY) == {}


def test_no_caller_asks_for_the_class_of_a_program() -> None:
    """Nor of a workload. A caller asks the program or the table that holds it; the class of a user's is checked."""
    asks = re.compile(r"isinstance\([^()]*(core\.executor|Program|StepRunner|Workload)\b")
    assert [module for module, path in LIBRARY.items() if asks.search(path.read_text())] == [
        "workbench.executors.programs.custom"
    ]


def test_no_class_of_the_core_has_more_methods_than_today() -> None:
    """Issue 35 asks for 25; functions that take a class of the engine first are counted."""
    names = {name.removesuffix(".py") for name in CORE}
    core = {module: path for module, path in LIBRARY.items() if module.partition(".")[2].split(".")[0] in names}
    assert max(methods_of_classes(core).values()) <= 34


def test_a_name_is_imported_from_the_file_that_defines_it() -> None:
    assert imports_from_elsewhere(LIBRARY) == []


def unread(root: Path) -> list[str]:
    """Return names of the library that stand once, and imports, variables and parameters that nothing reads.

    A method that several classes have may leave a parameter alone, and a function that is given as a value.
    """
    paths = [
        path for name in READERS for path in (root / name).rglob("*") if path.suffix in (".py", ".md", ".j2", ".js")
    ]
    texts = {str(path): path.read_text(encoding="utf-8") for path in paths}
    library = {str(path): texts[str(path)] for path in modules(root).values()}
    words = Counter(re.findall(r"\w+", "\n".join(texts.values())))
    source = re.sub(r"^ *from [\w.]+ import (\([^)]*\)|.*)", "", "\n".join(library.values()), flags=re.M)
    methods = Counter(re.findall(r"def (\w+)\(", source))
    values = Counter(re.findall(r"\w+", source)) - Counter(re.findall(r"(\w+)\(", source))
    found = []
    for path, text in library.items():
        undecorated = re.sub(r"^ *@[^@]*?(?:def|class) \w+", "", text, flags=re.M)
        named = (name for names in re.findall(NAMED, undecorated, re.M) for name in names if words[name] == 1)
        is_traced = path.endswith("scalar_code/trace.py")  # its methods are named as PyTorch's operators
        found += [f"{path}: {name}" for name in named if not is_traced and not re.fullmatch(CALLED, name)]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--output-format=json"]
    said = subprocess.run([*command, f"--select={UNREAD}", *library], capture_output=True, text=True).stdout
    for each in json.loads(said):
        lines = library[each["filename"]].splitlines()[: each["location"]["row"]]
        function = re.findall(r"def (\w+)\(", "\n".join(lines))[-1:] if each["code"].startswith("ARG") else []
        has_role = any(methods[name] > 1 or values[name] for name in function) and function != ["__init__"]
        found += [] if has_role else [f"{each['filename']}: {each['message']}"]
    return found


def formats_percent(source: str) -> bool:
    """Return whether an f-string formats a percent."""
    specs = (each.format_spec for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FormattedValue))
    return any("%'" in ast.unparse(spec) for spec in specs if spec)


def test_percents_are_formatted_by_units_alone() -> None:
    assert [module for module, path in LIBRARY.items() if formats_percent(path.read_text(encoding="utf-8"))] == []
    assert [formats_percent(each) for each in ("f'{x:.1%}'", "f'{x:{n}%}'", "f'{x:%Y}'")] == [True, True, False]


def test_what_is_named_is_read() -> None:
    """A setting that is ignored, a call that was left out or a result that is dropped leaves a name behind."""
    assert [each for each in unread(LIBRARY["workbench"].parents[1]) if not each.endswith(ALLOWED)] == []


def test_every_kind_of_unread_name_is_found(tmp_path: Path) -> None:
    lines = (
        "import os", "LIMIT = 2", "class A:", "    def __init__(self, given, kept):", "        self._state = kept",
        "    def work(self, key, tenant):", "        left = key", "        for row in key: pass",
        "    def _drop(self): pass", "    @property", "    def shown(self): pass",
        "def role(text, token): return token", "A(1, 2).work(role, 0)",
    )  # fmt: skip
    (tmp_path / "workbench").mkdir()
    (tmp_path / "workbench" / "a.py").write_text("\n".join(lines))
    found = [each.partition(": ")[2] for each in unread(tmp_path)]
    assert found[:3] == ["LIMIT", "_state", "_drop"]
    assert [re.findall("`(.*?)`", each) for each in found[3:]] == [["os"], ["given"], ["tenant"], ["left"], ["row"]]


def test_no_room_weighs_more_than_its_bound() -> None:
    assert too_heavy(by_room(weights())) == []


def test_each_measure_of_imports_can_fail(tmp_path: Path) -> None:
    package = tmp_path / "workbench"
    package.mkdir()
    (package / "a.py").write_text("class Same: ...\n\n\ndef f():\n    from workbench import b\n")
    (package / "b.py").write_text("import workbench.a\nimport workbench.engine.runner\n\n\nclass Same: ...\n")
    (package / "c.py").write_text("from workbench.a import b\nfrom workbench.b import workbench, Same\n")
    (package / "kv_cache").mkdir()
    (package / "kv_cache" / "wrong.py").write_text("def f():\n    from workbench.engine.runner import Runner\n")
    files = modules(tmp_path)
    assert len(circles(imports(files))) == 1 and list(duplicated_classes(files)) == ["Same"]
    assert [each.split(": ")[1] for each in imports_from_elsewhere(files)] == [
        "workbench.a has b from elsewhere",
        "workbench.b has workbench from elsewhere",
    ]
    assert {
        "workbench.kv_cache.wrong imports workbench.engine.runner.Runner",
        "workbench.a has no floor",
    } <= {*upward(files)}


def test_weight_is_counted_and_bounded_by_room(tmp_path: Path) -> None:
    for path, text in {
        "workbench/a.py": "x = 1\n",
        "workbench/engine/b.py": "x = 1\ny = (  # packed\n 2)\n",
        "workbench/engine/c.js": "a\n\n  \nb\n",
        "experiments/records/d.json": "[0.5]",
        "experiments/e.yaml": "a: 1\n",
        "runs/f.py": "made = 1\n",
        "workbench/runs/f.py": "",
        ".cache/g.py": "hidden = 1\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    weighed = by_room(weights(tmp_path))
    assert weighed == {
        "workbench": Weight(5),
        "workbench/engine": Weight(9, 2),
        "workbench/runs": Weight(1),
        "records": Weight(0, 0, 5),
        "experiments": Weight(0, 0, 5),
    }
    bounds = {"workbench": Weight(4, 9, 9), "workbench/engine": Weight(9, 1), "records": Weight(0, 0, inf)}
    assert [fault.partition(";")[0] for fault in too_heavy(weighed, bounds | {"gone": Weight(1)})] == [
        "experiments: no bound",
        "gone: no such room",
        "workbench/engine: 2 lines, at most 1",
        "workbench/runs: no bound",
        "workbench: 5 nodes, at most 4",
    ]
    assert too_heavy(weighed, bounds | weighed) == [] and room_of("workbench/engine/x/y.py") == "workbench/engine"
