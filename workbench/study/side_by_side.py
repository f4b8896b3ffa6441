"""Variants that run the same requests, in turn: what `workbench run` measures of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.study.experiment import Experiment
from workbench.study.findings import Findings
from workbench.study.metrics import summarize
from workbench.study.run import play, runner_for
from workbench.study.variants import every_variant, settings_text
from workbench.study.workload import requests_of
from workbench.trace.recorder import Recorder


def side_by_side(experiment: Experiment, tell: Callable[[str], None]) -> Findings:
    """One row a variant: latencies, rates and cache of its run, after as many warm-ups as the experiment asks for."""
    variants = every_variant(experiment)
    runners = {}
    for name, variant in variants.items():
        tell(f"loading and warming up: {name}")
        runners[name] = runner = runner_for(variant)
        requests = requests_of(variant, runner.tokenizer, runner.model.spec.vocab)
        for _ in range(variant.measure.warmup):
            play(runner, requests, name, False)
    rows: list[dict[str, Any]] = []
    tables: dict[str, list[dict[str, Any]]] = {"requests": [], "steps": [], "tokens": []}
    for name, variant in variants.items():
        tell(name)
        runner, recorder = runners[name], Recorder()
        runner.instruments.listener = recorder.note
        play(runner, requests_of(variant, runner.tokenizer, runner.model.spec.vocab), name, False)
        runner.instruments.listener = None
        summary = summarize(recorder.requests(), recorder.steps(), recorder.tokens())
        rows.append({
            "variant": name, "settings": settings_text(experiment, name), "lane": str(runner.lanes),
            **{f"{key}_p50": summary[key]["p50"] for key in ("ttft_s", "tpot_s", "e2el_s")},
            "output_tokens_per_s": summary["output_tokens_per_s"],
            "decode_tokens_per_s": summary["phases"]["decode"]["tokens_per_s"],
            "kv_bytes_peak": summary["kv_bytes_peak"],
        })  # fmt: skip
        for table, found in (
            ("requests", recorder.requests()),
            ("steps", recorder.steps()),
            ("tokens", recorder.tokens()),
        ):
            tables[table] += [{"variant": name, **row} for row in found]
    return Findings(rows, {}, tables)
