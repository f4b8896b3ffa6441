"""Measure the memory and time of loading a model, each way of loading in a separate process.

    python -m experiments.loading                 # a table of shape:smollm2-135m, and of its weights in a folder
    python -m experiments.loading --json --out experiments/records

Each row is a process of its own. It first loads a tiny model with the same settings, so that imports, compiled kernels
and what autotuning remembers are no part of the figures. Then the peak of its resident memory (VmHWM) is reset, the
model is loaded, and the peak is read. Pages of a mapped file count as resident once they are read, though the system
may drop them at any time; `anonymous` is the highest resident memory without them. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.display import Table
from workbench.machine.environment import child_environment, environment

SHAPE, TINY = "smollm2-135m", "tiny"
SAMPLE_SECONDS = 0.002  # between two looks at the anonymous memory
QUESTION = "How much memory and time does loading take?"


@dataclass(frozen=True)
class Case:
    """One way to load a model: `source` is random weights of a shape (`shape`), or a folder of the family `llama` or
    `phi3`."""

    name: str
    source: str
    settings: Mapping[str, Any]


CASES = (
    Case("files bfloat16, stored fused", "phi3", {"backend": "eager"}),
    Case("files bfloat16, fused when loaded", "llama", {"backend": "eager"}),
    Case("files bfloat16 as float32", "llama", {"backend": "eager", "dtype": "float32"}),
    Case("files to int8", "llama", {"backend": "eager", "weights": "int8"}),
    Case("files to int4", "llama", {"backend": "eager", "weights": "int4"}),
    Case("files bfloat16, mlir's panels", "llama", {"backend": "mlir"}),
    Case("files to int8, mlir's panels", "llama", {"backend": "mlir", "weights": "int8"}),
    Case("random bfloat16", "shape", {"backend": "eager"}),
    Case("random int8", "shape", {"backend": "eager", "weights": "int8"}),
    Case("random int4", "shape", {"backend": "eager", "weights": "int4"}),
    Case("random bfloat16, mlir's panels", "shape", {"backend": "mlir"}),
)


def write_folder(shape: str, family: str, folder: Path) -> None:
    """Write random bfloat16 weights of a shape as a folder of `family`: llama stores each projection separately, phi3
    joins those of attention and those of gate and up."""
    import torch
    from safetensors.torch import save_file

    from workbench.model.checkpoint_names import LLAMA_NAMES
    from workbench.model.hf.families import FAMILIES, config_from_spec
    from workbench.model.hf.weights import random_weights
    from workbench.model.model_parameters import stored_parameters
    from workbench.model.shapes import named_shape

    spec = named_shape(shape)
    names = FAMILIES[family].names if family != "llama" else LLAMA_NAMES
    state, found = random_weights(spec, torch.bfloat16), {}
    for name, parameter in stored_parameters(spec, names).items():
        rows = [part.shape_here[0] for part in parameter.parts]
        for part, tensor in zip(parameter.parts, state[name].split(rows), strict=True):
            found[part.name] = tensor if part.layout is None else part.layout.to_stored(tensor).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.clone() for name, tensor in found.items()}, folder / "model.safetensors")
    config = config_from_spec(spec) | {"model_type": family, "architectures": None, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def measure(case: Case, folders: Mapping[str, Path], shape: str = SHAPE) -> dict[str, Any]:
    """Load one case in a separate process, and return its bytes and seconds."""

    def model_of(shape: str) -> str:
        return f"shape:{shape}" if case.source == "shape" else str(folders[f"{case.source} {shape}"])

    jobs = [{"model": model_of(each), **case.settings} for each in (TINY, shape)]
    command = [sys.executable, "-m", "experiments.loading", "--job", json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(OMP_NUM_THREADS="2"))
    if done.returncode:
        raise RuntimeError(f"{case.name}: {done.stderr.strip().splitlines()[-1]}")
    return {"case": case.name, **json.loads(done.stdout.splitlines()[-1])}


def run_job(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Load the first job's model as a warm-up, then load the second's and return its bytes and seconds."""
    import gc

    from workbench.engine.config import EngineConfig
    from workbench.engine.loaded_model import LoadedModel, trim_heap
    from workbench.machine.processor import peak_bytes

    def load(settings: dict[str, Any]) -> LoadedModel:
        settings = dict(settings)
        return LoadedModel.load(EngineConfig.build(settings.pop("model"), **settings), lambda line: None)

    load(jobs[0])
    gc.collect()
    trim_heap()
    folder = Path(jobs[1]["model"])
    read_seconds = _read_seconds(folder) if folder.is_dir() else None
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    with _highest_anonymous() as highest:
        start = time.perf_counter()
        model = load(jobs[1]).transformer
        seconds = time.perf_counter() - start
    peak, weights = (peak_bytes() or 0) - before["VmRSS"], sum(each.nbytes for each in model.parameters())
    return {
        "weight_bytes": weights, "peak_bytes": peak, "anonymous_bytes": highest[0] - before["RssAnon"],
        "resident_bytes": _status("VmRSS")["VmRSS"] - before["VmRSS"], "share": peak / weights, "seconds": seconds,
        "read_seconds": read_seconds,
    }  # fmt: skip


def _read_seconds(folder: Path) -> float:
    """Return the seconds in which the files of a folder are read into one buffer, the better of two times."""
    buffer, best = bytearray(1 << 24), float("inf")
    for _ in range(2):
        start = time.perf_counter()
        for file in folder.glob("*.safetensors"):
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass
        best = min(best, time.perf_counter() - start)
    return best


def _status(*wanted: str) -> dict[str, int]:
    """Return bytes of this process's memory, by their names in /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)
             if name in ("VmRSS", "RssAnon", "RssFile")}  # fmt: skip
    return sizes


@contextmanager
def _highest_anonymous() -> Iterator[list[int]]:
    """Look at the anonymous memory again and again; the list holds its highest value."""
    highest, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(SAMPLE_SECONDS):
            highest[0] = max(highest[0], _status()["RssAnon"])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield highest
    finally:
        over.set()
        thread.join()
        highest[0] = max(highest[0], _status()["RssAnon"])


def measure_all(cases: tuple[Case, ...] = CASES, shape: str = SHAPE) -> list[dict[str, Any]]:
    """Measure every case, with folders written for this purpose."""
    with tempfile.TemporaryDirectory(prefix="workbench-loading-") as place:
        folders = {}
        for family in {case.source for case in cases} - {"shape"}:
            for each in (TINY, shape):
                folders[f"{family} {each}"] = Path(place) / f"{family}-{each}"
                write_folder(each, family, folders[f"{family} {each}"])
        return [measure(case, folders, shape) for case in cases]


def table(rows: list[dict[str, Any]]) -> Table:
    def cells(row: dict[str, Any]) -> list[object]:
        sizes = [round(row[name] / 1e6) for name in ("weight_bytes", "peak_bytes", "anonymous_bytes")]
        read = row["read_seconds"]
        return [row["case"], *sizes, row["share"], row["seconds"], read, read and row["seconds"] / read]

    columns = ("weights MB", "peak MB", "anonymous MB", "peak / weights", "seconds", "reading the files", "times that")
    return Table("", [cells(row) for row in rows], ("loading", *columns), left=())


def main() -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shape", default=SHAPE)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.job:
        print(json.dumps(run_job(json.loads(given.job))))
        return
    rows = measure_all(shape=given.shape)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"question": QUESTION, "date": date, "shape": given.shape, "rows": rows, "environment": environment()}
    if given.out:
        from workbench.runs.folder import write_dated_record

        print(f"record  {write_dated_record(record, given.out, 'loading')}", file=sys.stderr)
    print(json.dumps(record, indent=2) if given.json else table(rows).text())


if __name__ == "__main__":
    main()
