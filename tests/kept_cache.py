"""Keep what tests compile between runs, outside the checkout: the second run on a machine finds it.

MLIR's artifacts lie under the hash of the module, its passes, the target and the compilers' versions, so a change of
one kernel is cold for that kernel alone; Inductor keeps its code by graph, settings and torch's version. Everything
else that the workbench caches, measurements above all, is of one run. `WORKBENCH_TESTS_CACHE` names another folder: an
empty one makes a cold run, as `.ci/run` does.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from hypothesis.configuration import set_hypothesis_home_dir
from platformdirs import user_cache_path

ROOT = Path(__file__).resolve().parents[1]
KEPT, MAX_BYTES = "WORKBENCH_TESTS_CACHE", 4 << 30


def kept_folder() -> Path:
    """Return the folder of what is kept for these versions of the packages (constraints.txt)."""
    given = os.environ.get(KEPT)
    place = Path(given) if given else user_cache_path("inference-workbench") / "tests"
    return place / hashlib.sha256((ROOT / "constraints.txt").read_bytes()).hexdigest()[:12]


def link_compiled(installed: Path, bytecode: Path) -> None:
    """Link the modules that pip compiled when it installed them to where Python looks for them under the prefix
    `bytecode`: else a cold run compiles thousands of them once more. Python replaces a link whose source is newer."""
    if (place := bytecode / installed.relative_to(installed.anchor)).exists():
        return
    for folder, _, files in os.walk(installed):
        if folder.endswith("__pycache__"):
            target = place / Path(folder).parent.relative_to(installed)
            target.mkdir(parents=True, exist_ok=True)
            for file in files:
                (target / file).symlink_to(Path(folder) / file)


def _bytes_in(folder: str) -> int:
    with os.scandir(folder) as entries:
        return sum(
            _bytes_in(each.path) if each.is_dir() else each.stat().st_size for each in entries if not each.is_symlink()
        )


def begin_run() -> tempfile.TemporaryDirectory[str]:
    """Set the environment of this run's caches, for its processes too; return the folder that ends with the run."""
    kept = kept_folder()
    if kept.exists() and _bytes_in(str(kept)) > MAX_BYTES:
        shutil.rmtree(kept, ignore_errors=True)  # the next run is cold once
    for name in ("mlir", "inductor"):
        (kept / name).mkdir(parents=True, exist_ok=True)
    for name in ("stdlib", "purelib", "platlib"):
        link_compiled(Path(sysconfig.get_path(name)), kept / "bytecode")
    own = tempfile.TemporaryDirectory(prefix="workbench-tests-")
    (Path(own.name) / "mlir").symlink_to(kept / "mlir")
    os.environ["WORKBENCH_CACHE_DIR"] = own.name
    os.environ["WORKBENCH_DEFAULT_MODEL"] = "demo-chat"  # whether or not a real model is at hand
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(kept / "inductor")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(kept / "bytecode")  # of every module, and none beside
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(kept / "hypothesis")  # examples that failed
    set_hypothesis_home_dir(kept / "hypothesis")  # which this process may have looked up already
    return own
