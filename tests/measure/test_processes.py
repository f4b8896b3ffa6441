"""Fleets of processes: what is predicted, what is measured, and that both are the same figures."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from tests.measure.fleets import ClockedFleet, open_threads
from tests.simulate.scenes import TICK, fleet, scenes
from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import SLO, Experiment
from workbench.experiment.variants import VariantResults
from workbench.measure import compare_variants, predictions
from workbench.measure.compare_variants import run_comparison
from workbench.measure.jobs import job_metrics, job_row, jobs_of_events, request_metrics_of
from workbench.measure.processes.prediction import as_simulated, predict_processes
from workbench.measure.processes.rounds import PREDICTED, measure_processes
from workbench.measure.processes.traffic import calibration_traffic, measured_traffic
from workbench.measure.run import run
from workbench.measure.simulated import instance_spec_for
from workbench.progress import discard
from workbench.reports.variants_table import variant_tables
from workbench.simulate.events import FleetEventAdapter
from workbench.simulate.executor_settings import ProcessesExecutor
from workbench.simulate.step_times import TICKS_PER_SECOND, AttentionReach, LinearCost, StepTimeModel
from workbench.trace.events import Event

BASE = """
question: does a fleet do what was predicted?
model: {name: demo}
backend: eager
cache: {pages: 60, page_size: 16}
schedule: {max_num_seqs: 4, max_num_batched_tokens: 32}
executor: {kind: processes, instances: 2, predict: {requests: 8}}
workload: {kind: traffic, lengths: {kind: exponential, prompt: 40, output: 9}, arrivals: {kind: poisson, rate: 30},
           requests: 9}
measure: {warmup: 1, rounds: 2}
"""
VARIANTS = """
variants:
  replicas: {}
  one killed: {executor.failures: [{instance: 0, at: 0}]}
  pools: {executor.instances: 1, executor.decode: {instances: 1}}
"""


@given(scenes())
def test_figures_of_events_are_those_of_simulated_jobs(scene: dict[str, Any]) -> None:
    """One function serves both, and what it needs is in the events: over fleets with retries and handovers."""
    events: list[Event] = []
    run = fleet(scene, listener=FleetEventAdapter(events.append)).run()
    arrivals = {job.name: replace(job.arrival, time=job.arrival_time / TICKS_PER_SECOND) for job in run.jobs}
    kept = [each for each in run.jobs if not each.error]
    found = [job for job in jobs_of_events(arrivals, events) if not job.error]
    assert [job.name for job in found] == [job.name for job in kept]
    for mine, its in zip(found, kept, strict=True):
        ours, theirs = request_metrics_of(mine), request_metrics_of(its)
        # No event of a simulated run says where a request is, or that it was admitted to a step that a failure ended.
        unknown = {"retries", "instance"} | ({"queue_s"} if its.retries else set())
        assert {key: ours[key] for key in ours.keys() - unknown} == {
            key: theirs[key] for key in theirs.keys() - unknown
        }
    slo = SLO(ttft=50 * TICK, tpot=3 * TICK)
    ours, theirs = (job_row(each, job_metrics(each, slo, 1.0)) for each in (found, kept))
    known = {key for key in ours if not key.startswith(("queue_s", "retries", "offered"))}
    assert len(known) > 20 and {key: ours[key] for key in known} == {key: theirs[key] for key in known}


# A prompt's last chunk of one token counts as a decode to the simulator, so both tokens cost the same.
STEPS = LinearCost(step=20 * 10**12, prefill_tokens=2 * 10**12, decode_tokens=2 * 10**12, positions_read=(10**10,))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("message", [0.0, 0.007])
def test_a_fleet_that_is_as_the_simulator_has_it_is_predicted_exactly(split: bool, message: float) -> None:
    """Calibration, fit, prediction and measurement together, on a clock: each figure is the predicted one."""
    text = (
        BASE.replace("requests: 8", "requests: 40")
        .replace("rate: 30", "rate: 6")
        .replace("requests: 9", "requests: 30")
    )
    two = "{executor.instances: 1, executor.decode: {instances: 1, latency: 0.0, bytes_per_second: 1.0e+18}}"
    experiment = Experiment.from_yaml(text + f"variants: {{it: {two if split else {}}}}")
    times = StepTimeModel("known", (AttentionReach(None, 0),), (STEPS,))

    def open_clocked(config: EngineConfig, executor: ProcessesExecutor, threads: int) -> ClockedFleet:
        spec = instance_spec_for(as_simulated(experiment.variant("it"), None), times)
        return ClockedFleet(spec, executor, message)

    predicted = predict_processes(experiment, discard, open_clocked)
    assert predicted is not None
    (fit,) = predicted["calibrations"]
    assert fit["message_s"] == pytest.approx(message, abs=1e-6)
    assert fit["prefill_token_s"] == pytest.approx(2e-3, rel=0.01) and fit["errors"]["p90"] < 0.02
    (row,) = measure_processes(experiment, discard, predicted, open_clocked).rows
    assert row["finished"] == 30 and set(row["measured_over_predicted"]) == set(PREDICTED)
    for name, ratio in row["measured_over_predicted"].items():
        assert ratio == pytest.approx(1, abs=0.02), name


def test_a_prediction_is_written_before_the_first_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas, one of which is killed, and two pools, in threads; the figures of both are in one row."""
    predict = partial(predict_processes, open_fleet=open_threads)
    seen: list[dict[str, Any]] = []

    def measure(experiment: Experiment, on_progress: Any, predicted: Any) -> VariantResults:
        (file,) = tmp_path.glob("*/prediction.json")
        seen.append(json.loads(file.read_text()))
        assert not list(file.parent.glob("*.parquet"))
        return measure_processes(experiment, on_progress, predicted, open_threads)

    monkeypatch.setattr(predictions, "predict_processes", predict)
    monkeypatch.setattr(compare_variants, "measure_processes", measure)
    record = run_comparison(Experiment.from_yaml(BASE + VARIANTS), tmp_path, "fleet", progress=False)
    record.verify()
    (written,) = seen
    rows = {row["variant"]: row for row in record.summary["rows"]}
    assert list(rows) == list(written["variants"]) == ["replicas", "one killed", "pools"]
    assert len(written["calibrations"]) == 1  # the engines are alike, and as many
    assert record.summary["about"]["predicted_at"] == written["predicted_at"]
    for name, row in rows.items():
        assert (row["submitted"], row["finished"], row["failed"]) == (9, 9, 0), name
        assert row["prediction"] == {key: written["variants"][name][key] for key in row["prediction"]}
        assert row["ttft_s_p50"] > 0 and row["prediction"]["ttft_s_p90"] > 0
    assert written["calibrations"][0]["start_s"] > 0
    tokens = record.read_table("tokens.parquet").to_pylist()
    asked = sum(each.sampling.max_tokens for each in measured_traffic(Experiment.from_yaml(BASE)).requests)
    for name in rows:
        for turn in (1, 2):
            mine = [each for each in tokens if each["variant"] == name and each["round"] == turn]
            assert len(mine) == len({(each["request_id"], each["index"]) for each in mine}) == asked
    shown = "\n".join(table.text() for table in variant_tables(record.summary["rows"]))
    assert "measured / predicted" in shown


@pytest.mark.processes
def test_processes_serve_a_run_of_one_variant(tmp_path: Path) -> None:
    changes = ("executor={kind: processes, decode: {instances: 1}, predict: null}", "measure={warmup: 0, threads: 1}")
    record = run(Experiment.from_yaml(BASE, changes), tmp_path, "pools", progress=False)
    (row,) = record.summary["rows"]
    assert row["finished"] == 9 and "prediction" not in row and not (record.path / "prediction.json").exists()


def test_a_calibration_computes_other_requests_than_the_measured_ones() -> None:
    for workload in ("{}", "{kind: random, requests: 9, prompt_tokens: 5}"):
        changes = () if workload == "{}" else (f"workload={workload}",)
        experiment = Experiment.from_yaml(BASE, changes)
        measured, other = measured_traffic(experiment), calibration_traffic(experiment, 4)
        assert len(other.requests) == 4 and other.requests[0].arrival in (0.0, None)
        assert not {each.prompt_ids for each in measured.requests} & {each.prompt_ids for each in other.requests}
    prompts = Experiment.from_yaml(BASE, ("workload={kind: prompts, prompts: [a, b]}",))
    assert [each.prompt_ids for each in calibration_traffic(prompts, 4).requests] == [
        each.prompt_ids for each in measured_traffic(prompts).requests
    ]


def test_rounds_share_no_cached_prompt() -> None:
    traffic = measured_traffic(Experiment.from_yaml(BASE))
    salts = [{each.cache_salt for each in traffic.of_round(name)} for name in ("1", "2")]
    assert not salts[0] & salts[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("executor.failures=[{instance: 2, at: 1}]", "instance 2; there are 0 to 1"),
        ("executor.failures=[{instance: 0, at: 1, down: 3}]", "down"),
        ("executor={kind: processes, router: prefix_aware, decode: {}}", "executor.router: prefix_aware; pools give"),
        ("executor={kind: processes, decode: {router: round_robin}}", "executor.decode.router: round_robin; pools"),
        ("workload.arrivals={kind: closed_loop, clients: 2}", "closed_loop; a fleet of processes takes requests at"),
        ("workload={kind: quality}", "kind quality is measured on one engine"),
        ("measure.predict=true", "a fleet is predicted by `executor.predict`"),
        ("variants={a: {}, b: {executor: {kind: real}}}", "kind real in one variant and processes in others"),
        ("sampling.n=2", "2 samples or beams"),
    ],
)
def test_settings_that_no_fleet_has_are_reported(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(WorkbenchError, match=message):
        run(Experiment.from_yaml(BASE, (change,)), tmp_path, "wrong", progress=False)
    assert not list(tmp_path.iterdir())
