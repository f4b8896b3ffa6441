"""Run folders as `workbench run` leaves them, made by the thousand: figures drawn from a seed, nothing computed.

`python -m tests.runs.folders FOLDER COUNT` writes so many, to time a listing of them.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from functools import cache
from pathlib import Path

from workbench.experiment.experiment import Experiment
from workbench.runs.folder import RunFolder
from workbench.trace.events import Decoded, Finished, Scheduled, Stepped, Submitted
from workbench.trace.recorder import Recorder

RECORDS = Path(__file__).resolve().parents[2] / "experiments" / "records"
FORMATS = ("dense", "int8", "int4")


@cache
def _texts() -> tuple[str, str]:
    """Experiment and summary of one real run, whole; the others differ in settings and figures."""
    experiment = Experiment.from_values({"question": "How fast is it?", "workload": {"kind": "random"}})
    return experiment.to_yaml(), json.dumps(_real()["summary"])


@cache
def _real() -> dict:
    return json.loads((RECORDS / "first_light-20261121-102004.json").read_text())


def many(parent: Path, count: int, seed: int = 0) -> list[dict]:
    """Writes `count` run folders below `parent` and tells of each what a listing must say."""
    draw, rows = random.Random(seed), []
    text, summary_text = _texts()
    for index in range(count):
        name = f"sweep-20261121-{index // 3600:02d}{index // 60 % 60:02d}{index % 60:02d}-{index % 65536:04x}"
        kind, rate, busy = FORMATS[index % 3], draw.uniform(10, 1000), draw.uniform(0, 0.2)
        changed = text.replace("  format: dense\n", f"  format: {kind}\n", 1)
        changed = changed.replace("  seed: 0\n  n: 1\n", f"  seed: {index}\n  n: 1\n")
        changed = changed.replace("  max_num_seqs: 16\n", f"  max_num_seqs: {index % 64}\n")
        summary = json.loads(summary_text)
        summary |= {
            "wall_s": draw.random(),
            "output_tokens_per_s": rate,
            "backend": {"name": "eager", "reason": "asked"},
            "others_cpu_share": busy,
        }
        write(parent / name, changed, summary, environment(index))
        rows.append({"run": name, "cache.format": kind, "schedule.max_num_seqs": index % 64, "sampling.seed": index,
                     "output_tokens_per_s": rate, "others_cpu_share": busy, "wall_s": summary["wall_s"]})  # fmt: skip
    return rows


def environment(index: int = 0) -> dict:
    date = f"2026-11-21T{index // 3600 % 24:02d}:{index // 60 % 60:02d}:{index % 60:02d}+00:00"
    return {**_real()["environment"], "date": date}


def write(path: Path, experiment_text: str, summary: dict, about: dict) -> Path:
    """A finished run folder, without the waits for the disk that a real one takes."""
    path.mkdir(parents=True)
    texts = {
        "experiment.yaml": experiment_text,
        "environment.json": json.dumps(about, indent=2) + "\n",
        "summary.json": json.dumps(summary, indent=2) + "\n",
    }
    files = {}
    for name, text in texts.items():
        (path / name).write_text(text)
        files[name] = {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (path / "manifest.json").write_text(json.dumps({"files": files}))
    return path


def run_of_rounds(parent: Path, name: str, values: dict[str, list[float]], busy: float = 0.0, seed: int = 0) -> Path:
    """A finished run of variants in rounds: `values` are TTFTs in seconds by variant, one a round of one request."""
    variants = {variant: {"cache.format": FORMATS[index % 3]} for index, variant in enumerate(values)}
    experiment = Experiment.from_values({"question": "sooner?", "workload": {"kind": "random"}, "variants": variants})
    folder = RunFolder.create(parent, name)
    folder.write_text("experiment.yaml", experiment.with_(f"sampling.seed={seed}").to_yaml())
    folder.write_json("environment.json", environment())
    tables: dict[str, list[dict]] = {"requests": [], "steps": [], "tokens": []}
    for variant, ttfts in values.items():
        for turn, ttft in enumerate(ttfts, 1):
            recorder = Recorder()
            for event in (
                Submitted(0.0, "a", prompt_tokens=4, arrival=0.0), Scheduled(0.0, "a", action="admitted"),
                Decoded(ttft, "a"), Decoded(2 * ttft, "a", token_id=1, index=1, step=1),
                Stepped(2 * ttft, phase="decode", requests=1, decode_tokens=2, pages_used=1, kv_bytes=64,
                        wall_seconds=ttft, forward_seconds=ttft, predicted_flops=1.0, predicted_bytes=1.0),
                Finished(2 * ttft, "a", reason="length", token_ids=(0, 1)),
            ):  # fmt: skip
                recorder.record(event)
            for table, rows in tables.items():
                rows += [{"variant": variant, "round": turn, **row} for row in getattr(recorder, table)()]
    for table, rows in tables.items():
        folder.write_table(f"{table}.parquet", rows)
    rows = [{"variant": variant, "settings": "", "backend": "eager", "ttft_s_p50": sorted(ttfts)[len(ttfts) // 2]}
            for variant, ttfts in values.items()]  # fmt: skip
    folder.write_json("summary.json", {"rows": rows, "about": {"rounds": 1}, "verdicts": [], "others_cpu_share": busy,
                                       "wall_s": 1.0, "picture": None})  # fmt: skip
    return folder.finish()


if __name__ == "__main__":
    many(Path(sys.argv[1]), int(sys.argv[2]))
