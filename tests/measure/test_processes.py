"""Fleets of processes: what is predicted, what is measured, and that both are the same figures."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from tests.measure.fleets import ClockedFleet, open_threads
from tests.measure.small import PROCESSES, asked
from tests.simulate.scenes import TICK, fleet, scenes
from workbench.engine.config import EngineConfig
from workbench.experiment.experiment import SLO, Experiment, VariantResults
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
from workbench.simulate.arrival import Arrival
from workbench.simulate.events import FleetEventAdapter
from workbench.simulate.executor_settings import ProcessesExecutor
from workbench.simulate.step_times import TICKS_PER_SECOND, AttentionReach, LinearCost, StepTimeModel
from workbench.trace.events import Decoded, Event, Finished, Moved, Preempted

VARIANTS = """variants={
  replicas: {}, one killed: {executor.failures: [{instance: 0, at: 0}]},
  pools: {executor.instances: 1, executor.decode: {instances: 1}},
}"""


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


def test_requests_that_failed_count_as_failed_alone() -> None:
    arrivals = {name: Arrival(0.0, prompt, 1) for name, prompt in (("good", 5), ("bad", 70), ("open", 900))}
    events = [
        Decoded(1.0, "good", token_id=1), Finished(1.0, "good", reason="stop"), Moved(1.0, "bad"),
        Preempted(1.0, "open"), Finished(2.0, "bad", reason="error", error="lost"),
    ]  # fmt: skip
    found = job_metrics(jobs_of_events(arrivals, events), SLO(ttft=9.0, tpot=9.0), 2.0)
    counts = {"submitted": 3, "finished": 1, "failed": 1, "in_flight": 1, "retries": 1, "num_preemptions": 1}
    assert found["requests"] == {**counts, "errors": {"lost": 1}}
    assert found["tokens"]["prompt"] == 905 and found["goodput"]["share"] == 1 / 3


# A prompt's last chunk of one token counts as a decode to the simulator, so both tokens cost the same.
STEPS = LinearCost(step=20 * 10**12, prefill_tokens=2 * 10**12, decode_tokens=2 * 10**12, positions_read=(10**10,))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("message", [0.0, 0.007])
def test_a_fleet_that_is_as_the_simulator_has_it_is_predicted_exactly(split: bool, message: float) -> None:
    """Calibration, fit, prediction and measurement together, on a clock: each figure is the predicted one."""
    two = "{executor.instances: 1, executor.decode: {instances: 1, latency: 0.0, bytes_per_second: 1.0e+18}}"
    changes = "executor.predict.requests=40", "workload.arrivals.rate=6", "workload.requests=30"
    experiment = asked(PROCESSES, *changes, f"variants={{it: {two if split else '{}'}}}")
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
    record = run_comparison(asked(PROCESSES, VARIANTS), tmp_path, "fleet", progress=False)
    record.verify()
    (written,) = seen
    (calibration,) = written["calibrations"]  # the engines are alike, and as many
    assert calibration["start_s"] > 0 and record.summary["about"]["predicted_at"] == written["predicted_at"]
    rows = {row["variant"]: row for row in record.summary["rows"]}
    assert list(rows) == list(written["variants"]) == ["replicas", "one killed", "pools"]
    for name, row in rows.items():
        assert (row["submitted"], row["finished"], row["failed"]) == (9, 9, 0), name
        assert row["prediction"] == {key: written["variants"][name][key] for key in row["prediction"]}
        assert row["ttft_s_p50"] > 0 and row["prediction"]["ttft_s_p90"] > 0
    tokens = record.read_table("tokens.parquet").to_pylist()
    keys = {tuple(each[key] for key in ("variant", "round", "request_id", "index")) for each in tokens}
    wanted = sum(each.sampling.max_tokens for each in measured_traffic(asked(PROCESSES)).requests)
    assert len(keys) == len(tokens) and set(Counter(key[:2] for key in keys).values()) == {wanted}
    assert "measured / predicted" in "\n".join(table.text() for table in variant_tables(record.summary["rows"]))


@pytest.mark.processes
def test_processes_serve_a_run_of_one_variant(tmp_path: Path) -> None:
    changes = ("executor={kind: processes, decode: {instances: 1}, predict: null}", "measure={warmup: 0, threads: 1}")
    record = run(asked(PROCESSES, *changes), tmp_path, "pools", progress=False)
    (row,) = record.summary["rows"]
    assert row["finished"] == 9 and "prediction" not in row and not (record.path / "prediction.json").exists()


def test_a_calibration_computes_other_requests_than_the_measured_ones() -> None:
    for workload in ("{}", "{kind: random, requests: 9, prompt_tokens: 5}"):
        changes = () if workload == "{}" else (f"workload={workload}",)
        experiment = asked(PROCESSES, *changes)
        measured, other = measured_traffic(experiment), calibration_traffic(experiment, 4)
        assert len(other.requests) == 4 and other.requests[0].arrival in (0.0, None)
        assert not {each.prompt_ids for each in measured.requests} & {each.prompt_ids for each in other.requests}
    prompts = asked(PROCESSES, "workload={kind: prompts, prompts: [a, b]}")
    assert [each.prompt_ids for each in calibration_traffic(prompts, 4).requests] == [
        each.prompt_ids for each in measured_traffic(prompts).requests
    ]


def test_rounds_share_no_cached_prompt() -> None:
    traffic = measured_traffic(asked(PROCESSES))
    salts = [{each.cache_salt for each in traffic.of_round(name)} for name in ("1", "2")]
    assert not salts[0] & salts[1]
