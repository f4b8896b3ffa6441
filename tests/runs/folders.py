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
    experiment = experiment.with_(f"sampling.seed={seed}")
    folder = RunFolder.create(parent, name)
    folder.write_text("experiment.yaml", experiment.to_yaml())
    folder.write_json("environment.json", environment())
    requests, tokens, steps = [], [], []
    for variant, ttfts in values.items():
        for turn, ttft in enumerate(ttfts, 1):
            marks = {"variant": variant, "round": turn, "request_id": "a", "sample": 0}
            requests.append({**marks, "arrival": 0.0, "first_scheduled": 0.0, "first_token": ttft, "finished": 2 * ttft,
                             "prompt_tokens": 4, "cut_tokens": 0, "output_tokens": 2, "finish_reason": "length",
                             "cached_tokens": 0, "computed_tokens": 5, "restored_tokens": 0, "shared_pages": 0,
                             "num_preemptions": 0})  # fmt: skip
            tokens += [{**marks, "index": i, "token_id": i, "time": (1 + i) * ttft, "step": i} for i in range(2)]
            steps.append({"variant": variant, "round": turn, "time": 2 * ttft, "step": 0, "phase": "decode",
                          "requests": 1, "prefill_tokens": 0, "decode_tokens": 2, "pages_used": 1, "kv_bytes": 64,
                          "wall_seconds": ttft, "forward_seconds": ttft, "telemetry_seconds": 0.0,
                          "predicted_flops": 1.0, "predicted_bytes": 1.0, "pages_idle": 0, "compiles": 0})  # fmt: skip
    for table, rows in {"requests": requests, "steps": steps, "tokens": tokens}.items():
        folder.write_table(f"{table}.parquet", rows)
    rows = [{"variant": variant, "settings": "", "backend": "eager", "ttft_s_p50": sorted(ttfts)[len(ttfts) // 2]}
            for variant, ttfts in values.items()]  # fmt: skip
    folder.write_json("summary.json", {"rows": rows, "about": {"rounds": 1}, "verdicts": [], "others_cpu_share": busy,
                                       "wall_s": 1.0, "picture": None})  # fmt: skip
    return folder.finish()


if __name__ == "__main__":
    many(Path(sys.argv[1]), int(sys.argv[2]))
