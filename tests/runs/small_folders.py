"""Run folders and a sweep's, as small as they can be, with hostile words wherever users' words go."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.measure.runs import small_recorder
from workbench.experiment.experiment import Experiment
from workbench.experiment.verdict import RuleChange
from workbench.machine.environment import environment
from workbench.runs.folder import RunFolder
from workbench.runs.metrics import summarize
from workbench.runs.record import Record
from workbench.trace.recorder import Recorder

HOSTILE = (
    "</title><script src='https://evil.example/x.js'>alert(1)</script><img src=x onerror=alert(2)> & \"q\" 'p' \x00\x1b"
)
PLAIN = {"model": {"name": "shape:tiny"}, "workload": {"kind": "random", "requests": 1}, "backend": "eager"}


def experiment(question: str = "How fast?", **parts) -> Experiment:
    return Experiment.from_values({"question": question, **PLAIN, **parts})


def run_folder(
    parent: Path, asked: Experiment | None = None, recorder: Recorder | None = None, wall: float = 1.0, **summary
) -> Record:
    """A finished run with made-up requests."""
    recorder = recorder or small_recorder()
    folder = RunFolder.create(parent, "run")
    folder.write_text("experiment.yaml", (asked or experiment()).to_yaml())
    backend = {"name": "eager", "reason": "asked for"}
    folder.write_json("environment.json", {**environment(False, None, 0.0), "backend": backend})
    found = summarize(recorder.requests(), recorder.steps(), recorder.tokens(), recorder.verifications())
    kv = {"page_size": 4, "pages": 8, "pages_used_peak": 2, "bytes_per_token_formula": 16, "bytes_used_peak": 128,
          "bytes_allocated": 512, "bytes_allocated_formula": 512}  # fmt: skip
    found |= {"backend": backend, "kv": kv, "others_cpu_share": 0.0, "output_tokens_per_s": 3 / wall, **summary}
    for table in ("requests", "steps", "tokens", "decisions"):
        folder.write_table(f"{table}.parquet", getattr(recorder, table)())
    folder.write_json("summary.json", found)
    return Record.open(folder.finish())


def comparison_folder(
    parent: Path, verdict: str = "holds", words: str = "a word", svg: str = "<svg/>",
    changed: Sequence[RuleChange] | None = None,
) -> Record:  # fmt: skip
    folder = RunFolder.create(parent, "comparison")
    folder.write_text("experiment.yaml", experiment(words, variants={"a": {"backend": "eager"}, "b": {}}).to_yaml())
    folder.write_json("environment.json", environment(False, None, 0.0))
    rows = [{"variant": "a", "tpot_s_p50": 0.01, "predicted_speed_up": 2.0}, {"variant": words, "tpot_s_p50": 0.02}]
    entry: dict[str, object] = {"claim": "C1", "says": words, "rule": "a < b", "outcome": verdict,
                               "reason": "0.01 < 0.02"}  # fmt: skip
    if changed is not None:  # records that are older than the field have none
        entry["changed"] = [asdict(change) for change in changed]
    summary = {"rows": rows, "about": {}, "verdicts": [entry], "wall_s": 1.0, "others_cpu_share": 0.5, "picture": None}
    folder.write_json("summary.json", summary)
    folder.write_text("curves.svg", svg)
    return Record.open(folder.finish())


def sweep_folder(parent: Path) -> Path:
    """Four points: two done, one failed, one that has not run."""
    folder = parent / "sizes-20261121-120000-abcd"
    values = [(1, 32, 1.0), (8, 32, 0.5), (1, 64, None), (8, 64, None)]
    named = []
    for number, (seqs, tokens, wall) in enumerate(values):
        key, label = f"{number:016x}", f"schedule.max_num_seqs={seqs} tokens={tokens} <b>"
        named.append({"key": key, "label": label})
        point = folder / "points" / key
        point.mkdir(parents=True)
        settings = {"schedule.max_num_seqs": seqs, "workload.prompt_tokens": tokens}
        (point / "point.json").write_text(json.dumps({"key": key, "label": label, "settings": settings}))
        if wall is not None:
            record = run_folder(point, experiment(schedule={"max_num_seqs": seqs}), wall=wall)
            outcome = {"key": key, "run": record.name, "error": None, "seconds": 1.0, "peak_bytes": 1}
            (point / "outcome.json").write_text(json.dumps(outcome))
        elif seqs == 1:
            outcome = {"key": key, "run": None, "error": f"no memory {HOSTILE}", "seconds": 1.0, "peak_bytes": None}
            (point / "outcome.json").write_text(json.dumps(outcome))
    whole = {"name": "sizes", "points": named, "experiment": experiment("Which size?").model_dump(mode="json")}
    (folder / "sweep.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return folder
