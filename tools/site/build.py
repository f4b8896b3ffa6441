"""Stage the pages and have Sphinx build HTML from them; every warning counts as a problem."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tools.site.addresses import broken_addresses
from tools.site.stage import ROOT, stage

__all__ = ["ROOT", "build"]


def build(out: Path, root: Path = ROOT) -> list[str]:
    """Build the site of the checkout `root` into `out`/html; return one line for each problem.

    Sphinx runs in a process of its own: its extensions change docutils for the whole process.
    """
    source, html = out / "source", out / "html"
    for folder in (source, html):
        shutil.rmtree(folder, ignore_errors=True)
    problems = stage(source, root)
    line = [sys.executable, "-m", "sphinx", "-q", "-n", "-E", "-b", "html", "-c", str(root / "docs")]
    line += ["-d", str(out / "doctrees"), str(source), str(html)]
    done = subprocess.run(line, cwd=root, capture_output=True, text=True, check=False)
    shutil.rmtree(out / "doctrees", ignore_errors=True)
    problems += [each.replace(f"{source}/", "") for each in done.stderr.splitlines() if each.strip()]
    if done.returncode and not problems:
        problems.append(f"sphinx ended with {done.returncode}: {done.stdout[-500:]}")
    return problems + broken_addresses(html)
