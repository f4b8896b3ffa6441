"""`workbench capacity`: the rate that it finds, the fleet that it sizes, and how it ends."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.command_line import answer, cli
from tests.helpers.refusals import refuses
from workbench.economics.fleet import Demand, fleets_for
from workbench.measure import capacity
from workbench.measure.capacity import MIN_COUNTED, PRECISION, at_rate, highest_rate, metrics_at_rate
from workbench.measure.simulation import simulate_experiment, simulation_experiment

TRAFFIC = {"kind": "traffic", "lengths": {"kind": "exponential", "prompt": 900, "output": 20}}


def experiment(decode_instances: int = 0) -> Any:
    executor: dict[str, Any] = {"kind": "simulated", "instances": 1}
    if decode_instances:
        executor["decode"] = {"instances": decode_instances}
    return simulation_experiment("shape:llama-3.1-8b", executor, TRAFFIC, {"ttft": 0.3, "tpot": 0.02})


def test_the_rate_is_within_the_slo_and_the_next_one_is_not() -> None:
    found, asked = highest_rate(experiment(), 0.9, 4.0), experiment()

    def share(rate: float) -> float:
        return metrics_at_rate(asked, rate, 4.0)["goodput"]["share"]

    assert 0 < found["rate"] < found["too_high"] and found["too_high"] - found["rate"] <= PRECISION * found["too_high"]
    assert share(found["rate"]) == found["at_rate"]["goodput"]["share"] >= 0.9 > share(found["too_high"])


@given(highest=st.floats(0.02, 300))
def test_a_rate_with_exactly_the_wanted_share_is_within_it(highest: float) -> None:
    """All in time up to a rate, and none too late is allowed: the search ends there, not where it began."""

    def metrics(asked: Any, rate: float, seconds: float) -> dict[str, Any]:
        return {"goodput": {"share": 1.0 if rate <= highest else 0.99}}

    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(capacity, "metrics_at_rate", metrics)
        found = highest_rate(experiment(), 1.0, 4.0)
    assert found["rate"] <= highest < found["too_high"] <= found["rate"] / (1 - PRECISION)


def test_two_pools_send_every_prompt_once() -> None:
    """A handover sends what the first token was computed from: the prompt, token by token."""
    metrics = simulate_experiment(at_rate(experiment(decode_instances=1), 20.0, 3.0))
    sent, prompt, submitted = metrics["handed_over"], metrics["tokens"]["prompt"], metrics["requests"]["submitted"]
    assert sent["sequences"] <= submitted == metrics["requests"]["finished"]
    whole = sent["bytes"] / metrics["about"]["kv_bytes_per_token"]
    assert whole <= prompt and (sent["sequences"] < submitted or whole == prompt)  # one of a single token stays
    assert simulate_experiment(at_rate(experiment(), 20.0, 1.0))["handed_over"] is None


@given(rate=st.floats(0.01, 200), seconds=st.floats(0.5, 20))
def test_enough_requests_count(rate: float, seconds: float) -> None:
    """A share is estimated from 200 requests or more, and from half of those of the seconds that are asked for."""
    workload: Any = at_rate(experiment(), rate, seconds).workload
    requests: int = workload.requests
    assert requests >= 2 * MIN_COUNTED and rate * seconds <= requests <= max(rate * seconds + 1, 2 * MIN_COUNTED)


def test_requests_in_the_middle_count() -> None:
    """An instance that is down for the first eighth makes late only requests that do not count."""
    asked = experiment().with_("executor.failures=[{instance: 0, at: 0, down: 20}]")
    found = metrics_at_rate(asked, 2.0, 1.0)
    late = found["requests"]["submitted"] - simulate_experiment(at_rate(asked, 2.0, 1.0))["goodput"]["requests"]
    assert found["counted"] == 200 and late > 20 and found["goodput"]["share"] == 1


def test_failed_requests_are_outside_the_slo() -> None:
    """Without a decode instance a request has a first token in time, and no end."""
    lost = experiment(decode_instances=1).with_("executor.failures=[{instance: 1, at: 0}]")
    found = metrics_at_rate(lost, 2.0, 1.0)
    assert found["requests"]["failed"] > 350 and found["goodput"]["share"] < 0.1
    refuses("even a single request misses the SLO", highest_rate, lost, 0.9, 1.0)


@given(
    users=st.integers(1, 10**8),
    requests_a_day=st.floats(0.1, 1000),
    peak=st.floats(1, 10),
    rate=st.floats(0.1, 500),
    price=st.floats(0.01, 100),
)
def test_a_fleet_is_large_enough_and_no_larger(
    users: int, requests_a_day: float, peak: float, rate: float, price: float
) -> None:
    metrics = {
        "requests": {"submitted": 10},
        "tokens": {"prompt": 5000, "output": 200},
        "handed_over": {"sequences": 10, "bytes": 5000 * 7},
    }
    demand = Demand(users, requests_a_day, peak)
    sized = fleets_for({"rate": rate, "at_rate": metrics}, demand, experiment(decode_instances=2), price)
    fleets, needed = sized["fleets"], users * requests_a_day * peak / 86_400
    assert (fleets - 1) * rate < needed * (1 + 1e-9) and fleets * rate >= needed * (1 - 1e-9)
    assert sized["instances"] == sized["accelerators"] == 3 * fleets
    assert sized["handed_over_bytes_per_s"] == pytest.approx(7 * sized["prompt_tokens_per_s"])
    a_day = users * requests_a_day * 20 / 1e6  # millions of output tokens
    assert sized["per_million_output_tokens"] * a_day == pytest.approx(sized["per_day"])
    assert sized["per_user_a_month"] * users == pytest.approx(30 * sized["per_day"])


def test_it_is_read_by_people_and_by_programs() -> None:
    words = "capacity azure --set measure.slo.tpot=0.02 --set workload.length=0.2 --seconds 4 --users 9999 --per-hour 2"
    found, out = answer(words), cli(words).out
    fleet = found["fleet"]
    assert f"{found['rate']:.3g} requests/s" in out and f"{fleet['accelerators']:,} accelerators" in out
    assert fleet["fleets"] == math.ceil(fleet["peak_rate"] / found["rate"]) and fleet["per_hour"] == 2 * fleet["fleets"]
