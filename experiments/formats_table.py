"""Compare the weight formats of quantized files: `python -m experiments.formats_table [--json] [--out
experiments/records]`.

The demo model is packed in each format by plain packers (workbench/testing/packers.py: rounding to nearest, no
calibration), loaded as it is, and held against the dense model: bytes in files and in memory, KL of the next token on
held-out text, and decode speed. The rule, written before the run: what is kept in its bits gives the logits of the same
file widened within 1e-4 of the largest; formats of 4 bits in groups of 32 lie within a factor of three of one another
in KL. Speed is in rounds, one decode of each format a round, since machines drift.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from workbench import load
from workbench.display import Table
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.engine.runner import Runner
from workbench.machine.environment import environment
from workbench.measure.quality.held_out import cut_windows, held_out_modules, sample_windows
from workbench.measure.quality.teacher_forcing import ForcedText, ReferenceLogits, measure_divergence
from workbench.progress import discard
from workbench.runs.folder import write_dated_record
from workbench.testing import packers
from workbench.testing.packers import Packer, pack_folder
from workbench.trace.events import Finished

FORMATS: dict[str, Packer] = {
    "GPTQ 4 bits": packers.gptq,
    "GPTQ 8 bits": partial(packers.gptq, bits=8),
    "GPTQ 3 bits": partial(packers.gptq, bits=3),
    "AWQ": packers.awq,
    "compressed-tensors INT4": packers.pack_quantized,
    "compressed-tensors INT4 with zeros": partial(packers.pack_quantized, zero=True),
    "compressed-tensors INT8": packers.int_quantized,
    "compressed-tensors FP8": packers.float_quantized,
    "compressed-tensors MXFP4": packers.mxfp4_pack,
    "FP8 in blocks of 128x128": packers.fp8,
    "bitsandbytes 4 bits": packers.nf4,
    "bitsandbytes INT8": packers.bnb_int8,
}
FOUR_BITS = ("GPTQ 4 bits", "AWQ", "compressed-tensors INT4", "compressed-tensors INT4 with zeros")
WINDOWS, CONTEXT, TOKENS = 4, 256, 48
PROMPT = "def fibonacci(n):\n"
LOGITS_BOUND, KL_RATIO = 1e-4, 3.0


def texts_of(runner: Runner) -> list[ForcedText]:
    """Return windows of held-out text, the same for every format."""
    assert runner.tokenizer is not None
    windows = sample_windows(cut_windows(runner.tokenizer, held_out_modules().texts, CONTEXT), WINDOWS, 0, CONTEXT)
    return [ForcedText(each.ids, each.first_scored, len(each.ids) - 1) for each in windows]


def decode_rate(runner: Runner) -> float:
    """Return the tokens per second of one greedy text, the time of its prompt included."""
    began = time.perf_counter()
    ends = [each for each in runner.stream(PROMPT, max_tokens=TOKENS, temperature=0, ignore_eos=True)
            if isinstance(each, Finished)]  # fmt: skip
    return len(ends[0].token_ids) / (time.perf_counter() - began)


def difference_from_widened(folder: Path, ids: list[int]) -> float:
    """Return the largest difference between the logits of a file loaded as it is and widened to float32, relative to
    the largest logit."""
    settings: dict[str, Any] = {"dtype": "float32", "backend": "eager", "report": discard}
    own, wide = (load(folder, **settings, weights=weights).model.logits(ids) for weights in ("auto", "dense"))
    return float((own - wide).abs().max() / wide.abs().max())


def measure(
    names: list[str], backend: str, rounds: int, progress: Callable[[str], object]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row for each format, the dense model first, and the verdict of the rule."""
    source = BUNDLED_MODELS["demo"]
    with tempfile.TemporaryDirectory() as place:
        folders = {"dense": source}
        for name in names:
            folders[name] = Path(place) / name.replace(" ", "-")
            pack_folder(source, folders[name], FORMATS[name])
            progress(f"packed {name}")
        lines: dict[str, list[str]] = {name: [] for name in folders}
        runners = {name: load(folder, backend=backend, report=lines[name].append) for name, folder in folders.items()}
        reference = ReferenceLogits.compute(runners["dense"], texts_of(runners["dense"]))
        ids = list(reference.texts[0].ids[:64])
        rates: dict[str, list[float]] = {name: [] for name in folders}
        for runner in runners.values():
            decode_rate(runner)  # compiles and warms up
        for _ in range(rounds):
            for name, runner in runners.items():
                rates[name].append(decode_rate(runner))
        rows = []
        for name, runner in runners.items():
            found = measure_divergence(runner, reference)
            rows.append({
                "format": name,
                "file_bytes": sum(file.stat().st_size for file in folders[name].glob("*.safetensors")),
                "memory_bytes": runner.model.weight_bytes,
                "in_memory": str(runner.model.format),
                "widened": [line for line in lines[name] if "widened" in line],
                "kl": statistics.fmean(found.kl),
                "same_top": statistics.fmean(found.same_top),
                "tokens_per_s": rates[name],
                "difference_from_widened": difference_from_widened(folders[name], ids) if name != "dense" else 0.0,
            })  # fmt: skip
            progress(f"measured {name}")
    kls = [row["kl"] for row in rows if row["format"] in FOUR_BITS]
    largest = max(row["difference_from_widened"] for row in rows)
    ratio = max(kls) / min(kls) if kls else 1.0
    verdict = {
        "largest_difference_from_widened": largest, "bound": LOGITS_BOUND,
        "kl_ratio_of_4_bits": ratio, "kl_ratio_allowed": KL_RATIO,
        "holds": largest <= LOGITS_BOUND and ratio <= KL_RATIO,
    }  # fmt: skip
    return rows, verdict


def table(rows: list[dict[str, Any]]) -> Table:
    cells = [
        [
            row["format"],
            f"{row['file_bytes'] / 1e6:.1f}",
            f"{row['memory_bytes'] / 1e6:.1f}",
            "widened" if row["widened"] else row["in_memory"],
            f"{row['kl']:.4f}",
            f"{row['same_top']:.1%}",
            f"{statistics.median(row['tokens_per_s']):.0f}",
        ]
        for row in rows
    ]
    columns = ("format", "MB in files", "MB a decode step reads", "kept as", "KL", "same top", "tokens/s")
    return Table("Formats of the demo model", cells, columns)


def main(
    formats: Annotated[str, typer.Option(help="some formats, separated by commas; empty: all")] = "",
    backend: Annotated[str, typer.Option(help="auto, eager, inductor or mlir")] = "mlir",
    rounds: Annotated[int, typer.Option(help="decodes of each format")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="the record on standard output")] = False,
    out: Annotated[Path | None, typer.Option(help="folder for a dated record")] = None,
) -> None:
    """Pack the demo model in each format, load it, and measure bytes, KL and decode speed."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    names = formats.split(",") if formats else list(FORMATS)
    unknown = [name for name in names if name not in FORMATS]
    if unknown:
        raise typer.BadParameter(f"no format {unknown[0]!r}; there are {', '.join(FORMATS)}")
    rows, verdict = measure(names, backend, rounds, lambda line: print(line, file=sys.stderr, flush=True))
    record = {
        "experiment": "formats_table", "date": date, "environment": environment(), "backend": backend,
        "model": "demo", "verdict": verdict, "rows": rows,
    }  # fmt: skip
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        Console(width=140).print(table(rows).text())
        print(f"largest difference from widened {verdict['largest_difference_from_widened']:.1e}")
    if out is not None:
        print(write_dated_record(record, out, "formats_table"), file=sys.stderr)
    raise typer.Exit(0 if verdict["holds"] else 1)


if __name__ == "__main__":
    typer.run(main)
