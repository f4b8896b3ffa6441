"""Check that test helpers are outside of test files, and that everything random in a test comes from a printed seed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tools.lint.tree import ROOT, python

# Also in the code of a child process, which is a text.
IMPORT = re.compile(
    r"\b(?:from|import)\s+(?:tests\.|\.+)(?:\w+\.)*test_\w+|\bfrom\s+(?:tests\b|\.)[\w.]*\s+import\s+test_\w+"
)
UNSEEDED = re.compile(r"\burandom\(|\bRandom\(\)|\bSystemRandom\b|\bdefault_rng\(\)")
SEED = "tests/thorough.py"  # chooses the run's seed, and prints it


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield imports from a test file, and random draws without a seed."""
    for path, text in python(root, "tests"):
        if path in (SEED, "tests/test_lint.py"):  # which plants them
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if found := IMPORT.search(line):
                yield f"{path}:{number}: {found[0]!r}; no test imports a test: move it to tests/helpers"
            if found := UNSEEDED.search(line):
                yield f"{path}:{number}: {found[0]!r} has no seed; random.Random(run_seed()) of tests/thorough.py"
