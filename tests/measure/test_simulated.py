"""Simulated runs: the files of a real run, closed loops, variants over a swept setting."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.measure.small import SIMULATED, asked, is_drawn
from workbench.experiment.build import requests_of
from workbench.measure import simulated
from workbench.measure import simulation as curves
from workbench.measure.compare_variants import run_comparison
from workbench.measure.run import run
from workbench.measure.simulated import (
    THIS_MACHINE,
    describe_simulation,
    failures_of,
    fleet_for,
    hardware_for,
    instance_spec_for,
    pools_for,
)
from workbench.measure.simulation import simulate_experiment, simulation_experiment
from workbench.scheduler.policies import Fair
from workbench.simulate.fleet import InstanceFailure, KVTransfer
from workbench.simulate.routers import PrefixAware, RoundRobin


def test_a_simulated_run_leaves_the_files_of_a_real_one(tmp_path: Path) -> None:
    record = run(asked(SIMULATED), tmp_path, "sim")
    record.verify()
    summary, steps, requests = record.summary, record.steps.to_pylist(), record.requests.to_pylist()
    assert summary["requests"] == {"count": 12, "by_finish_reason": {"length": 12}, "num_preemptions": 0}
    assert [row["output_tokens"] for row in requests] == [128] * 12
    assert record.tokens.num_rows == 12 * 128
    assert summary["wall_s"] == pytest.approx(summary["simulated"]["simulated_s"])
    assert all(a["time"] <= b["time"] for a, b in itertools.pairwise(steps))
    assert sum(step["prefill_tokens"] for step in steps) == summary["tokens"]["prompt"]
    assert all(step["predicted_bytes"] > 13e9 and step["pages_used"] for step in steps)
    for name, share in (("ttft_s", "p50"), ("tpot_s", "p99")):
        assert summary["simulated"][name][share] == pytest.approx(summary[name][share])
    assert summary["simulated"]["goodput"]["share"] == summary["goodput"]["share"] == 1.0
    again = run(asked(SIMULATED), tmp_path, "sim")
    assert again.tokens == record.tokens


def test_no_step_is_quicker_than_reading_the_weights_and_none_slower_than_the_count(tmp_path: Path) -> None:
    record = run(asked(SIMULATED), tmp_path, "sim")
    for step in record.steps.to_pylist():
        least = max(step["predicted_flops"] / 989.5e12, step["predicted_bytes"] / 3.35e12)
        assert step["wall_seconds"] == pytest.approx(least, rel=2e-3)


@pytest.mark.parametrize(
    "workload", ["{kind: random, requests: 5, output_tokens: 9}", "{kind: prompts, prompts: [a, b c]}"]
)
def test_other_workloads_are_simulated_too(workload: str) -> None:
    experiment = asked(SIMULATED, f"workload={workload}", "model.name=demo", "sampling.max_tokens=9")
    from workbench.measure.simulation import tokenizer_of

    fleet = fleet_for(experiment, tokenizer=tokenizer_of(experiment)).run()
    assert fleet.finished == fleet.submitted > 1 and {job.generated_tokens for job in fleet.jobs} == {9}


def test_clients_wait_for_their_answers(tmp_path: Path) -> None:
    """On the real runner and under simulated time: never more under way than clients, and all are served."""
    changes = ("model.name=shape:tiny", "backend=eager", "measure={warmup: 0, ceilings: false}", "workload.requests=7")
    lengths = "workload.lengths={kind: fixed, prompt: 5, output: 4}"
    loop = "workload.arrivals={kind: closed_loop, clients: 2, think: 0.001}"
    for executor in ("real", "simulated"):
        experiment = asked(SIMULATED, *changes, lengths, loop, f"executor={{kind: {executor}}}")
        rows = run(experiment, tmp_path, executor, progress=False).requests.to_pylist()
        assert len(rows) == 7 and {row["finish_reason"] for row in rows} == {"length"}
        moments = sorted([(row["arrival"], 1) for row in rows] + [(row["finished"], -1) for row in rows])
        assert max(itertools.accumulate(change for _, change in moments)) <= 2


def test_variants_and_a_swept_setting(tmp_path: Path) -> None:
    variants = "variants={one: {}, two: {executor.instances: 2}}"
    sweep = "sweep={axes: {workload.arrivals.rate: [40, 400]}}"
    record = run_comparison(asked(SIMULATED, variants, sweep), tmp_path, "sweep", progress=False)
    rows = record.summary["rows"]
    assert [row["variant"] for row in rows] == ["one", "two"]
    assert [point["value"] for point in rows[0]["curve"]] == [40, 400]
    assert rows[0]["ttft_s_p99"] == rows[0]["curve"][0]["ttft_s_p99"] <= rows[0]["curve"][1]["ttft_s_p99"]
    assert rows[1]["curve"][1]["ttft_s_p99"] < rows[0]["curve"][1]["ttft_s_p99"]
    assert is_drawn(record)
    bars = curves.chart([{k: v for k, v in row.items() if k != "curve"} for row in rows], "bars").svg()
    assert bars.startswith("<svg") and "two" in bars


def test_simulating_from_words() -> None:
    executor = {"kind": "simulated", "instances": 2, "router": "prefix_aware", "decode": {"instances": 1}}
    workload = {"kind": "traffic", "lengths": {"kind": "azure"}, "requests": 50}
    experiment = simulation_experiment(
        "shape:llama-3.1-70b", executor, workload, {"ttft": 0.5}, True, ("executor.gpus=4",)
    )
    found = simulate_experiment(experiment)
    assert found["requests"]["submitted"] == found["requests"]["finished"] == 50
    assert len(found["instances"]) == 3 and found["about"]["instances"] == 3
    assert found["about"]["kv_bytes_per_token"] == 327_680
    early = simulate_experiment(experiment, until=3.0)["requests"]
    assert early["in_flight"] == early["submitted"] - early["finished"] > 0


def test_settings_reach_the_simulated_fleet() -> None:
    experiment = asked(
        SIMULATED, "schedule={max_num_seqs: 3, max_num_batched_tokens: 77, chunk_tokens: 33, policy: fair}",
        "cache={page_size: 8, pages: 50, prefix: {kind: radix, ttl: 9}}", "executor.instances=2",
        "executor.router=round_robin", "executor.failures=[{instance: 1, at: 2, down: 3}]",
        "executor.decode={instances: 3, router: prefix_aware, bytes_per_second: 5, latency: 0.5}",
    )  # fmt: skip
    spec = instance_spec_for(experiment)
    assert (spec.limits, spec.limits.chunk_tokens, spec.policy) == (experiment.schedule, 33, Fair())
    assert (spec.page_size, spec.pages, spec.prefix, spec.ttl) == (8, (50,), True, 9)
    pool, decode, transfer = pools_for(experiment, spec)
    assert (pool.count, pool.router, transfer) == (2, RoundRobin(), KVTransfer(5.0, 0.5)) and decode is not None
    assert (decode.count, decode.router, decode.spec.receives_kv, decode.spec.prefix) == (3, PrefixAware(), True, False)
    assert failures_of(experiment) == (InstanceFailure(1, 2.0, 3.0),)


@pytest.mark.parametrize(
    "change", ["compute_share=0.5", "memory_share=0.5", "overhead=0.001", "hardware=a100", "gpus=2", "pipeline=2"]
)
def test_settings_of_the_accelerators_change_step_times(change: str) -> None:
    times = [instance_spec_for(asked(SIMULATED, *more)).times for more in ((), (f"executor.{change}",))]
    assert times[0] != times[1]


def test_links_of_this_machine_are_as_quick_as_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = SimpleNamespace(
        read_ceiling=lambda size: SimpleNamespace(value=size + 1.0),
        gemm_ceiling=lambda dtype: SimpleNamespace(value=5.0),
    )
    monkeypatch.setattr(simulated, "ceilings_for", lambda size, dtypes: measured)
    executor, sizes = SimpleNamespace(hardware=THIS_MACHINE, memory=0.5), SimpleNamespace(weight_bytes=9.0)
    found = hardware_for(executor, sizes, "float32")  # type: ignore[arg-type] (what it reads)
    assert {found.bandwidth, found.link, found.network, found.cpu_link} == {10.0} and found.flops == 5.0


def test_a_smaller_share_of_the_memory_holds_fewer_pages() -> None:
    pages = [instance_spec_for(asked(SIMULATED, f"executor.memory={share}")).pages for share in (0.5, 0.9)]
    assert 0 < pages[0][0] < pages[1][0]


@pytest.mark.parametrize(("gpus", "pipeline"), [(4, 1), (2, 2), (1, 4)])
def test_four_accelerators_have_the_memory_of_four(gpus: int, pipeline: int) -> None:
    """Little is held more than once; the fullest rank decides. The description says what travels."""
    changes = ("model.name=shape:llama-3.1-70b", f"executor.gpus={gpus}", f"executor.pipeline={pipeline}")
    found = describe_simulation(asked(SIMULATED, *changes))
    whole = (0.9 * 4 * 80e9 - 141.1e9) / 327_680
    assert 0.95 * whole < found["cache_tokens"] <= 1.001 * whole
    sent = 2 * 80 * 2 * (gpus - 1) / gpus * 8192 * 2
    assert found.get("all_reduce_bytes_per_token", 0) == sent
    assert found.get("bubble_share") == (None if pipeline == 1 else pytest.approx((pipeline - 1) / (2 * pipeline - 1)))


def test_traffic_becomes_requests_of_the_real_runner() -> None:
    experiment = asked(SIMULATED)
    requests = requests_of(experiment, None, 1000)
    assert len(requests) == 12 and all(max(request.prompt_ids) < 1000 for request in requests)
    assert requests == requests_of(experiment, None, 1000)
    assert len({request.sampling.seed for request in requests}) == 12
    system = {request.prompt_ids[:512] for request in requests}
    assert len(system) == 1  # that of all sessions


CROWD = """
workload: {kind: traffic, lengths: {kind: exponential, output: 32}, arrivals: {kind: at_once}, requests: 80,
           tenants: {many: 9, few: 1}, priorities: {0: 1, 7: 3}}
"""


def test_policies_tell_tenants_and_priorities_of_a_workload_apart(tmp_path: Path) -> None:
    """All come at once: who is favoured waits less, by the policy that favours it and by no other."""
    queues = {}
    for policy in ("fcfs", "priority", "fair"):
        changes = f"workload={yaml.safe_load(CROWD)['workload']}", f"schedule.policy={policy}"
        record = run(asked(SIMULATED, *changes), tmp_path, policy)
        summary, rows = record.summary, record.requests.to_pylist()
        assert {row["tenant"] for row in rows} == {"many", "few"} and {row["priority"] for row in rows} == {0, 7}
        assert sum(each["requests"] for each in summary["by_tenant"].values()) == 80
        for by in ("by_tenant", "by_priority"):
            for name, found in summary["simulated"][by].items():
                assert found["ttft_s"]["p50"] == pytest.approx(summary[by][name]["ttft_s"]["p50"])
            queues |= {(policy, name): found["queue_s"]["p50"] for name, found in summary[by].items()}
    assert queues["priority", "0"] < 0.4 * queues["priority", "7"]
    assert queues["fair", "few"] < 0.4 * queues["fair", "many"]
    assert queues["fcfs", "0"] > 0.7 * queues["fcfs", "7"] and queues["fcfs", "few"] > 0.7 * queues["fcfs", "many"]
