"""Count the size ("weight") of every folder of the source, which has an upper bound: `python -m tools.weight` prints a
table.

The weight of Python is its number of AST nodes; of JavaScript, CSS, HTML and templates, the lines that are not blank;
of data (JSON, YAML, Parquet, CSV, NumPy), the bytes. `tests/test_structure.py` checks each folder's bound. Packing code
densely gains nothing, and moved code counts in its new folder.
"""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = (".js", ".css", ".html", ".j2", ".jinja")
DATA = (".json", ".yaml", ".yml", ".parquet", ".csv", ".npy", ".npz")
MADE = ("build", "dist", "runs")  # folders of the checkout that are not in the repository
RECORDS = ("experiments/records/", "experiments/zoo/records/", "experiments/claims/")  # their data: runs add to it
# Of workbench; at cd0df211, which issue 32 counts, 324,461 of 887,937 nodes.
CORE = ("request.py", "batch.py", "trace", "kv_cache", "prompt", "model", "constrained", "sampling", "scheduler",
        "executors", "decoding", "oracle", "tensor_parallel", "speculative", "inspect", "engine")  # fmt: skip


class Weight(NamedTuple):
    """A size: AST nodes of Python, lines of pages, and bytes of data. In a bound, infinity means no limit."""

    nodes: float
    lines: float = 0
    bytes: float = 0


# The most that each room may weigh: at the start what it weighed, rounded up to 500 nodes, 50 lines, 1,000 bytes.
# No bound rises except where an issue says so: write that beside it.
BOUNDS: dict[str, Weight] = {
    "benchmarks": Weight(19_950),  # 19,000 before 34: log-probabilities of llama.cpp; 37: a file beside it; 39: options
    # Issue 37 asks for 140,000, of which one product and two walks over pages (issue 38) reached this.
    "compiled_kernels": Weight(154_750),
    "docs": Weight(500, 100),
    "experiments": Weight(105_350, 0, 78_000),  # 132,100 before issue 39: training to tools, kills to tests
    "notebooks": Weight(9_500),
    "records": Weight(0, 0, inf),
    "tests": Weight(785_150),  # 782,700 before issue 40; 766,800 before issue 39: tests/long, out of experiments; laws
    "tools": Weight(47_650, 200),  # 34,400 before 13,400 of tools/training came out of experiments (issue 39)
    "workbench": Weight(19_920),  # 18_950 before issue 39: units, out of memory, runs, cli, engine and widgets
    "workbench/agents": Weight(15_600),  # 12,000 before issue 33: forms of calls, and the check of arguments
    "workbench/bench": Weight(9_000),
    "workbench/check": Weight(13_200),
    "workbench/claims": Weight(7_620),
    "workbench/cli": Weight(24_350),  # 28,300 before issue 39: tables and options that stood twice
    "workbench/cluster": Weight(41_500),  # 36,000 before issue 36: pages that travel, out of kv_cache and engine
    "workbench/constrained": Weight(18_900),  # issue 35: out of sampling (29,700 before), and a user's own
    "workbench/decoding": Weight(5_000),  # issue 35: out of engine (44,000 before) and sampling (29,500)
    "workbench/demo": Weight(0, 50, 1_045_000),
    "workbench/economics": Weight(9_100, 0, 2_000),
    "workbench/figures": Weight(5_120),  # issue 39: charts, out of reports, measure and widgets
    "workbench/engine": Weight(34_800),  # 31,100 before: issue 36, a request and its neighbours run again
    "workbench/executors": Weight(29_550),  # 28,400 before: issue 36, a program of the user's own
    "workbench/experiment": Weight(3_980),  # 5,300 before issue 39: a workload is a file of measure
    "workbench/gateway": Weight(24_950),  # issue 39: 26,500 before, rules by regex
    "workbench/inspect": Weight(15_600),
    "workbench/kv_cache": Weight(28_500),
    "workbench/lab": Weight(4_000, 100, 1_000),
    "workbench/machine": Weight(6_500),
    "workbench/measure": Weight(47_800),  # 42,800 before issue 40: texts of packages, needles, choices, intervals
    "workbench/memory": Weight(5_700),
    "workbench/model": Weight(97_000),
    "workbench/models": Weight(3_000),  # issue 34: real models by name
    "workbench/offline": Weight(2_750),  # 4,500 before issue 39: bodies and answers are the dialects' of serve
    "workbench/oracle": Weight(8_200),  # out of engine
    "workbench/prompt": Weight(46_400),  # 42,500 before issues 33, forms of calls, and 34; 37: merges on disk
    "workbench/reports": Weight(17_250, 150),  # 16,950 before issue 40: differences with intervals
    "workbench/runs": Weight(21_400),  # 21,000 before issue 39: measures are declared, not guessed from names
    "workbench/sampling": Weight(11_600),  # 37: top-p looks at the likeliest tokens first
    "workbench/scheduler": Weight(17_950),  # 19,700 before issue 35: tokens and pages are counted in one loop
    "workbench/serve": Weight(76_850),  # 75,000 before issue 36: requests kept for replays, price of a miss
    "workbench/simulate": Weight(16_900, 0, 5_000),  # issue 39: tables of numbers are data files
    "workbench/speculative": Weight(7_000),
    "workbench/sweep": Weight(11_550),
    "workbench/tensor_parallel": Weight(14_300),
    "workbench/testing": Weight(28_900),  # 28,500 before: issue 36, the kit for programs
    "workbench/trace": Weight(9_000),
    "workbench/widgets": Weight(159_600, 1_250),  # issue 32: a click that comes while a picture is redrawn is kept
    "workbench/zoo": Weight(9_500),
}


def room_of(path: str) -> str:
    """Return the name under which a file's weight counts: a folder of workbench, workbench itself, or a folder of the
    checkout."""
    if path.startswith(RECORDS) and path.endswith(DATA):
        return "records"
    top, *rest = path.split("/")
    return f"{top}/{rest[0]}" if top == "workbench" and len(rest) > 1 else top


def weight_of(path: Path) -> Weight:
    """Return the weight of one file."""
    if path.suffix == ".py":
        return Weight(sum(1 for _ in ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    if path.suffix in PAGES:
        return Weight(0, sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines()))
    return Weight(0, 0, path.stat().st_size if path.suffix in DATA else 0)


def weights(root: Path = ROOT) -> dict[str, Weight]:
    """Return the weight of each file in the checkout's folders, by path; hidden and generated folders are left out."""
    found = {}
    for folder in sorted(root.iterdir()):
        if folder.is_dir() and folder.name not in MADE and not re.search(r"^\.|\.egg-info$", folder.name):
            for path in sorted(folder.rglob("*")):
                if path.suffix in (".py", *PAGES, *DATA) and path.is_file():
                    found[path.relative_to(root).as_posix()] = weight_of(path)
    return found


def by_room(files: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return the total weight of each folder ("room")."""
    weighed: dict[str, Weight] = {}
    for path, weight in files.items():
        room = room_of(path)
        weighed[room] = Weight(*map(operator.add, weighed.get(room, Weight(0)), weight))
    return weighed


def too_heavy(weighed: Mapping[str, Weight], bounds: Mapping[str, Weight] = BOUNDS) -> list[str]:
    """Return a line for each folder that exceeds its bound, each folder without a bound, and each bound without a
    folder."""
    found = [f"{room}: no bound; give it a row in tools/weight.py" for room in weighed.keys() - bounds.keys()]
    found += [f"{room}: no such room; take its bound out of tools/weight.py" for room in bounds.keys() - weighed.keys()]
    for room in weighed.keys() & bounds.keys():
        for measure, weight, bound in zip(Weight._fields, weighed[room], bounds[room], strict=True):
            if weight > bound:
                found.append(f"{room}: {weight:,} {measure}, at most {bound:,}; make it smaller")
    return sorted(found)


def main() -> int:
    found = weights()
    weighed = by_room(found)
    print(f"{'room':26}" + "".join(f"{name:>12}{'at most':>12}" for name in Weight._fields))
    for room, weight in sorted(weighed.items(), key=lambda item: -item[1].nodes):
        pairs = zip(weight, BOUNDS.get(room, Weight(0)), strict=True)
        print(f"{room:26}" + "".join(f"{number:12,}{bound:12,}" for number, bound in pairs))
    core = sum(weight.nodes for path, weight in found.items()
               if path.startswith("workbench/") and path.split("/")[1] in CORE)  # fmt: skip
    whole = sum(weight.nodes for room, weight in weighed.items() if room.startswith("workbench"))
    print(f"core of workbench (prompt to engine): {core:,} nodes; around it {whole - core:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
