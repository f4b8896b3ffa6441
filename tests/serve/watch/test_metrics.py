"""Metrics for Prometheus: each counter is the sum over the calls that it is of, each gauge what the runners say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from workbench.cluster.accounts import FleetAccount
from workbench.cluster.replica import PageCounts
from workbench.request import SamplingParameters
from workbench.serve.answers.pieces import Used
from workbench.serve.call import Call
from workbench.serve.gate import Outcome
from workbench.serve.watch.metrics import Metrics
from workbench.serve.watch.traces import CallTrace
from workbench.trace.events import Decoded, Finished, Preempted, Prefilled, Scheduled, Submitted

USED = Used(0, prompt_tokens=30, completion_tokens=5, cached_tokens=16, drafted_tokens=4, accepted_tokens=3)


def values_of(metrics: Metrics) -> dict[str, float]:
    """Return samples by name, with the labels that are not the model's."""
    found = {}
    for family in text_string_to_metric_families(metrics.page().decode()):
        for each in family.samples:
            labels = [value for name, value in each.labels.items() if name != "model_name"]
            found[" ".join([each.name.partition(":")[2], *labels])] = each.value
    return found


def settled(ended: str, **values: Any) -> CallTrace:
    """Return the trace of a call that was settled, ten seconds long and preempted once."""
    trace = CallTrace(Call("c", "openai.chat", "m", ((1,),), SamplingParameters(), **values))
    at = trace.began
    trace.keep([
        Submitted(at + 1, "c"), Scheduled(at + 2, "c", action="admitted"), Prefilled(at + 4, "c", tokens=1, computed=1),
        Decoded(at + 4, "c", token_id=1), Preempted(at + 5, "c"), Decoded(at + 8, "c", token_id=2, index=1),
        Finished(at + 8, "c", reason="length", token_ids=(1, 2)),
    ])  # fmt: skip
    trace.outcome = Outcome(USED, ended, 10.0, 4.0)
    return trace


def test_counters_are_of_the_calls_that_they_say() -> None:
    metrics = Metrics({})
    metrics.observe(CallTrace(settled("finished").call))  # under way: of nothing yet
    assert not any(values_of(metrics).values())
    for trace in (
        settled("finished"), settled("cancelled"), settled("kept"), settled("finished", purpose="embed"),
        settled("finished", purpose="tokenize"),
    ):  # fmt: skip
        metrics.observe(trace)
    metrics.refused("m")
    found = values_of(metrics)
    ends = {"finished": 3, "cancelled": 1, "kept": 1, "refused": 1}
    assert {name: count for name, count in found.items() if name.startswith("calls_total")} == {
        f"calls_total {name}": count for name, count in ends.items()
    }
    assert (found["e2e_request_latency_seconds_count"], found["e2e_request_latency_seconds_sum"]) == (4, 40)
    twice = {
        "time_to_first_token_seconds_sum": 4, "inter_token_latency_seconds_sum": 4, "prompt_tokens_total": 30,
        "generation_tokens_total": 5, "prefix_cache_queries_total": 30, "prefix_cache_hits_total": 16,
        "spec_decode_num_draft_tokens_total": 4, "spec_decode_num_accepted_tokens_total": 3,
        "num_preemptions_total": 1, "request_success_total length": 1, "request_prompt_tokens_sum": 30,
        "request_generation_tokens_sum": 5, "request_queue_time_seconds_sum": 1, "request_prefill_time_seconds_sum": 2,
        "request_decode_time_seconds_sum": 4,
    }  # fmt: skip
    assert {name: round(found[name], 6) for name in twice} == {name: 2 * each for name, each in twice.items()}


def test_gauges_are_what_runners_and_fleets_say() -> None:
    account = FleetAccount("b", submitted=7, output_tokens=50, moves=3, lost_attempts=2, lost_tokens=11)
    fleet = SimpleNamespace(accounts={"b": account}, num_replicas={"b": 4}.get)
    one = SimpleNamespace(pages=PageCounts(2, 3, 5), num_requests=(6, 9), fleet=fleet)
    models: Any = {"m": one, "empty": SimpleNamespace(pages=PageCounts(), num_requests=(0, 0), fleet=None)}
    page = Metrics(models).page().decode()
    assert 'kv_cache_usage_perc{model_name="empty"} 0.0' in page
    del models["empty"]
    found = values_of(Metrics(models))
    assert (found["num_requests_running"], found["num_requests_waiting"]) == (6, 9)
    assert found["kv_cache_usage_perc"] == 0.2, "pages of the prefix cache alone are not in use"
    fleets = {name: count for name, count in found.items() if name.endswith(" b")}
    assert fleets == {
        "replicas b": 4, "fleet_samples_total b": 7, "fleet_output_tokens_total b": 50, "fleet_moves_total b": 3,
        "fleet_lost_attempts_total b": 2, "fleet_lost_tokens_total b": 11,
    }  # fmt: skip
