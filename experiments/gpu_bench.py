"""Benchmark Triton's kernels and the whole model on one GPU: `python -m experiments.gpu_bench [--quick]`.

(a) Every kernel against its specification in float64, (b) each timed case beside torch's own form and the card's
measured ceilings, (c) decode and prefill of `shape:llama-3.1-8b` beside transformers. Every part runs in a separate
process, so that a part that breaks, hangs or spoils the device does not affect the results of other parts. It takes at
most ten minutes and needs no network. With TRITON_INTERPRET=1 it is rehearsed without a GPU, and leaves no record:
every part on small shapes in Triton's interpreter, and every kernel compiled to PTX.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.gpu_timing import REHEARSED

HERE = Path(__file__).resolve().parent
SECONDS = 7200 if REHEARSED else 570  # of the whole
CHECKED = (
    "rms_norm", "add_rms_norm", "rotary", "gated_silu", "gated_gelu", "gated_clamped", "linear_quantized",
    "kv_write", "paged_attention", "quantized_attention", "top_logprobs", "expert_linear",
)  # fmt: skip
# Seconds each part may take: together all of them. Checks compile at once and time nothing.
CHECK_SECONDS = 110
PARTS = {"kernels": 110, "model dense": 160, "model int8": 95, "model int4": 95}
REHEARSAL = dict.fromkeys([*(f"check {operator}" for operator in CHECKED), *PARTS, "ptx"], 1200)  # one after another


def rows_of(part: str, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of one part of the benchmark, measured in this process."""
    from experiments import gpu_kernels, gpu_models

    kind, _, what = part.partition(" ")
    if kind == "check":
        yield from gpu_kernels.checked(what)
    elif kind == "model":
        yield from gpu_models.models(what, what == "dense", quick)
    elif kind == "ptx":
        yield from gpu_kernels.compiled()
    else:
        yield from gpu_kernels.kernels(quick)


class BenchmarkPart:
    """One part of the benchmark, running in a separate process that writes one row per line."""

    def __init__(self, name: str, quick: bool, folder: Path):
        self.name, self.began = name, time.monotonic()
        self._rows, self._words = folder / f"{name}.jsonl", folder / f"{name}.txt"
        command = [sys.executable, "-m", "experiments.gpu_bench", "--part", name, "--rows", str(self._rows)]
        environment = os.environ | ({"TRITON_INTERPRET": "0"} if name == "ptx" else {})
        with self._words.open("w") as words:
            self._process = subprocess.Popen(
                command + ["--quick"] * quick, cwd=HERE.parent, env=environment, stdout=words, stderr=subprocess.STDOUT
            )

    def finished(self, seconds: float) -> dict[str, Any]:
        """Wait at most `seconds` for the process, and return the part's rows, and its error if there is one."""
        error = None
        try:
            if code := self._process.wait(max(1.0, seconds)):
                error = f"ended with {code}: {self._words.read_text()[-500:].strip()}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            error = f"not done after {seconds:.0f} s"
        lines = self._rows.read_text().splitlines() if self._rows.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("}")]
        took = time.monotonic() - self.began
        return {"part": self.name, "seconds": took, "rows": whole, **({"error": error} if error else {})}


def play(quick: bool, tell=print) -> list[dict[str, Any]]:
    """Run all parts: the checks at once, then every other part alone. Return their rows and errors."""
    began = time.monotonic()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        checks = [] if REHEARSED else [BenchmarkPart(f"check {each}", quick, Path(folder)) for each in CHECKED]
        for part in checks:
            found.append(part.finished(CHECK_SECONDS - (time.monotonic() - began)))
            tell(summarize_part(found[-1]))
        for name, most in (REHEARSAL if REHEARSED else PARTS).items():
            left = SECONDS - (time.monotonic() - began)
            if left < 20:
                found.append({"part": name, "rows": [], "error": "no time was left for it"})
            else:
                found.append(BenchmarkPart(name, quick, Path(folder)).finished(min(most, left)))
            tell(summarize_part(found[-1]))
    return found


def failures(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the failed rows of a part, followed by the part itself if its process failed."""
    bad = [row for row in part["rows"] if row.get("status") == "failed" or "error" in row]
    return [*bad, *([part] if "error" in part else [])]


def summarize_part(part: dict[str, Any]) -> str:
    """Describe a part in one line: its rows and failures."""
    rows = part["rows"]
    bad = [row for row in failures(part) if row is not part]
    line = f"{part['part']}: {len(rows)} rows, {len(bad)} of them failed"
    for row in bad[:3]:
        what = f"{row.get('operator', row.get('work', ''))} {row.get('case', row.get('batch', ''))}"
        line += f"\n  {what}: {row.get('reason') or row.get('error')}"
    return line + (f"\n  {part['error']}" if "error" in part else "")


def main(
    out: Annotated[Path, typer.Option(help="folder of the record")] = HERE / "records",
    quick: Annotated[bool, typer.Option("--quick", help="few repetitions and shapes")] = False,
    part: Annotated[str | None, typer.Option(hidden=True)] = None,
    rows: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check and measure the backend triton on the GPU of this machine, and write the record."""
    import torch

    if not (torch.cuda.is_available() or REHEARSED or part == "ptx"):
        raise typer.BadParameter("gpu_bench needs a CUDA device, and there is none here")
    if part is not None and rows is not None:
        with rows.open("w", buffering=1) as lines:
            for row in rows_of(part, quick):
                lines.write(json.dumps(row) + "\n")
        return
    from workbench.machine.environment import environment
    from workbench.runs.folder import write_dated_record

    date = datetime.now(UTC).isoformat(timespec="seconds")
    current_environment, parts = environment(), play(quick)
    record = {
        "experiment": "gpu_bench",
        "date": date,
        "quick": quick,
        "environment": current_environment,
        "parts": parts,
    }
    if not REHEARSED:
        print(write_dated_record(record, out, "gpu_bench"))
    raise typer.Exit(1 if any(failures(part) for part in parts) else 0)


if __name__ == "__main__":
    typer.run(main)
