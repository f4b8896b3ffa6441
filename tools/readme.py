"""Run what `make demo` runs, keep its record, and put what it printed into docs/first_run.md.

    .venv/bin/python -m tools.readme            # twice: with empty caches, then with what the first left
    .venv/bin/python -m tools.readme --from experiments/records/first_light-DATE.json

The block between the page's two marks is a function of the record alone; tools/lint/first_run.py holds that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, RECORDS = ROOT / "docs" / "first_run.md", ROOT / "experiments" / "records"
COMMAND = "workbench run experiments/first_light.yaml"
BEGIN, END = "<!-- made by `python -m tools.readme`: begin -->\n", "<!-- made by `python -m tools.readme`: end -->\n"
COLUMNS = 100
BUSY = 0.1  # of the processor taken by others: such a record is not for the front page


def block(record: dict[str, Any], name: str) -> str:
    """Return the text between the page's marks: the record's machine and date, the seconds that the demo took, and what
    it printed."""
    where, demo = record["environment"], record["demo"]
    others = record["summary"]["others_cpu_share"] or 0.0
    beside = f", beside other processes that took {others:.0%} of the processor" if others > BUSY else ""
    cpu, cores, threads = where["cpu"]["model"], where["cpu"]["cores"], where["threads"]["torch"]
    return (
        f"What `make demo` printed on {cpu}, {cores} cores, torch's threads {threads}, {where['date'][:10]}{beside}.\n"
        f"After the install it took {demo['cold_s']:.0f} s with nothing compiled, and {demo['warm_s']:.0f} s with what "
        f"that left, which is shown\n(record: `experiments/records/{name}`):\n\n```\n{demo['printed']}```\n"
    )


def with_block(page: str, made: str) -> str:
    """Return the page with `made` as the text between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{made}{END}{rest.split(END)[1]}"


def block_of(page: str) -> str:
    """Return the text between the page's marks."""
    return page.split(BEGIN)[1].split(END)[0]


def measured() -> tuple[dict[str, Any], str]:
    """Run the demo cold and then warm; return the record of the warm run, and the name of its file."""
    with tempfile.TemporaryDirectory(prefix="workbench-readme-") as folder:
        place = Path(folder)
        (place / "experiments").symlink_to(ROOT / "experiments")
        variables = os.environ | {
            "WORKBENCH_CACHE_DIR": f"{folder}/cache", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "COLUMNS": str(COLUMNS), "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        took = []
        for _ in range(2):
            began = time.perf_counter()
            line = [str(Path(sys.executable).with_name("workbench")), *COMMAND.split()[1:]]
            done = subprocess.run(line, cwd=place, env=variables, capture_output=True, text=True, check=True)
            took.append(time.perf_counter() - began)
        run = max((place / "runs").iterdir())
        printed = "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"
        for path in (os.path.relpath(line[0], place), line[0]):  # the relative one ends with the absolute one
            printed = printed.replace(path, ".venv/bin/workbench")
        record = {
            **{name: json.loads((run / f"{name}.json").read_text()) for name in ("summary", "environment")},
            "experiment": (run / "experiment.yaml").read_text(),
            "demo": {"command": COMMAND, "cold_s": took[0], "warm_s": took[1], "printed": printed},
        }
        return record, f"{run.name.rpartition('-')[0]}.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--from", dest="record", type=Path, help="a record made before, in place of a run")
    parser.add_argument("--busy", action="store_true", help="keep a record made beside other processes")
    given = parser.parse_args()
    if given.record is not None:
        record, name = json.loads(given.record.read_text()), given.record.name
    else:
        record, name = measured()
        others = record["summary"]["others_cpu_share"] or 0.0
        if others > BUSY and not given.busy:
            message = f"other processes took {others:.0%} of the processor: nothing is kept (--busy keeps it)"
            print(message, file=sys.stderr)
            return 1
        (RECORDS / name).write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(with_block(PAGE.read_text(), block(record, name)))
    print(f"docs/first_run.md shows experiments/records/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
