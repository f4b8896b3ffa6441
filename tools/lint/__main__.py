"""Run the guards over the tree once, and print each fault: file, line, what is wrong, and what would be right.

    .venv/bin/python -m tools.lint           # every guard
    .venv/bin/python -m tools.lint words     # those named

A guard is a module of this folder with a function `faults`. tests/test_lint.py holds that each can fail.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

# Those that import nothing of the library come first: they say in seconds what most changes get wrong.
GUARDS = (
    "layout", "words", "docstrings", "reasons", "clocks", "scale", "figures", "first_run", "planted_bugs", "release",
    "front_door", "pages", "records", "blocks", "zoo",
)  # fmt: skip


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("guard", nargs="*", choices=[[], *GUARDS], help="all of them unless named")
    names = parser.parse_args(words).guard or GUARDS
    found = 0
    for name in names:
        for fault in import_module(f"tools.lint.{name}").faults():
            print(fault, flush=True)
            found += 1
    print(f"{len(names)} guards, {found or 'no'} faults")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
