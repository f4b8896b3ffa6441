"""Laws of traffic: times, scaling, shared tokens, closed loops, trace files."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.request import SamplingParameters
from workbench.simulate.arrival import Arrival, prompt_ids, request_from_arrival, scale_arrivals
from workbench.simulate.generators import poisson_times
from workbench.simulate.source import source_of
from workbench.simulate.trace_files import read_trace
from workbench.simulate.traffic_settings import (
    AsRecorded,
    AtOnce,
    Bursts,
    ClosedLoop,
    ExponentialLengths,
    FixedLengths,
    Poisson,
    SessionLengths,
    TrafficSettings,
)

KINDS = st.one_of(
    st.just(AtOnce()),
    st.builds(Poisson, rate=st.floats(0.1, 100)),
    st.builds(Bursts, rate=st.floats(0.1, 100), size=st.integers(1, 9)),
)
LENGTHS = st.sampled_from(
    [FixedLengths(prompt=9, output=4), ExponentialLengths(prompt=30, output=7), SessionLengths(sessions=3, turns=2)]
)
VOCAB = 257


def traffic(**settings: Any) -> TrafficSettings:
    return TrafficSettings.model_validate({"arrivals": AtOnce(), "lengths": FixedLengths(), **settings})


def arrivals_of(workload: TrafficSettings) -> list[Arrival]:
    return list(source_of(workload).initial_arrivals())


@given(KINDS, LENGTHS, st.integers(1, 40), st.integers(0, 9))
def test_traffic_is_whole_in_order_and_the_same_every_time(
    arrivals: object, lengths: object, count: int, seed: int
) -> None:
    workload = traffic(arrivals=arrivals, lengths=lengths, requests=count, seed=seed)
    made = arrivals_of(workload)
    assert len(made) == count and made == arrivals_of(workload)
    assert all(a.time <= b.time for a, b in itertools.pairwise(made))
    assert TrafficSettings.model_validate(workload.model_dump(mode="json")) == workload


@pytest.mark.parametrize("arrivals", [Poisson(rate=5), Bursts(rate=5, size=4)])
def test_the_mean_rate_is_the_one_asked_for(arrivals: object) -> None:
    workload = traffic(arrivals=arrivals, requests=8000)
    last = arrivals_of(workload)[-1]
    assert 8000 / last.time == pytest.approx(5, rel=0.1)


@given(st.lists(st.floats(0.5, 20), min_size=1, max_size=3), st.integers(0, 9))
def test_times_of_a_poisson_process_rise_from_period_to_period(counts: list[float], seed: int) -> None:
    times = [*itertools.islice(poisson_times(counts, 2.0, random.Random(seed)), 200)]
    assert times == sorted(times) and times[-1] > 2.0


@given(st.floats(0, 5), st.floats(0.02, 3), st.integers(0, 5))
def test_what_was_shared_stays_shared_when_scaled(time: float, length: float, seed: int) -> None:
    given_ = {"lengths": SessionLengths(sessions=2, turns=3), "arrivals": Poisson(rate=1), "requests": 8, "seed": seed}
    workload, plain = traffic(time=time, length=length, **given_), arrivals_of(traffic(**given_))
    made = arrivals_of(workload)
    prompts = [prompt_ids(arrival, VOCAB, str(number)) for number, arrival in enumerate(made)]
    for (a, pa, qa), (_, pb, qb) in itertools.combinations(zip(made, prompts, plain, strict=True), 2):
        blocks = sum(1 for _ in itertools.takewhile(lambda two: two[0] == two[1], zip(qa.blocks, qb.blocks)))  # noqa: B905
        tokens = min(blocks * a.block_tokens, len(pa), len(pb))
        assert pa[:tokens] == pb[:tokens]
        assert len(pa) == a.prompt_tokens and len(a.blocks) == -(-len(pa) // a.block_tokens)
        assert a.time == pytest.approx(qa.time * time) and max(pa) < VOCAB


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 200), st.integers(0, 5))
def test_a_turn_shares_the_whole_blocks_of_the_turn_before(system: int, question: int, output: int, seed: int) -> None:
    """A block that the prompt before filled in part has the answer and the next question in it now."""
    lengths = SessionLengths(sessions=1, turns=4, system=system, question=question, output=output)
    made = arrivals_of(traffic(lengths=lengths, arrivals=Poisson(rate=1), requests=4, seed=seed))
    for before, after in itertools.pairwise(made):
        shared = sum(1 for one, other in zip(before.blocks, after.blocks, strict=False) if one == other)
        assert shared == before.prompt_tokens // before.block_tokens


@given(st.integers(0, 500), st.integers(0, 500))
def test_blocks_have_the_same_tokens_exactly_where_their_names_are_the_same(a: int, b: int) -> None:
    one, other = (prompt_ids(Arrival(0, 64, 1, blocks=(name,), block_tokens=64), 1000, "") for name in (a, b))
    assert (one == other) == (a == b)


def test_a_prompt_without_blocks_is_its_own() -> None:
    alone = [prompt_ids(Arrival(0, 20, 1), VOCAB, name) for name in ("a", "b", "a")]
    assert alone[0] == alone[2] != alone[1]


def test_a_request_has_the_lengths_of_its_arrival() -> None:
    asked = SamplingParameters(temperature=0, stop=("x",))
    request = request_from_arrival(Arrival(2.5, 7, 3, tenant="t"), "r", VOCAB, asked)
    assert len(request.prompt_ids) == 7 and request.arrival == 2.5 and request.cache_salt == "t"
    assert request.sampling.max_tokens == 3 and request.sampling.ignore_eos and not request.sampling.stop


@given(st.integers(1, 6), st.integers(1, 30), st.floats(0, 3), st.floats(0, 2), st.randoms(use_true_random=False))
def test_a_closed_loop_never_has_more_under_way_than_clients(
    clients: int, count: int, think: float, scale: float, draw
) -> None:
    workload = traffic(arrivals=ClosedLoop(clients=clients, think=think), requests=count, time=scale)
    source = source_of(workload)
    under_way = list(source.initial_arrivals())
    seen = len(under_way)
    assert seen == min(clients, count) and all(a.time == 0 for a in under_way)
    while under_way:
        ended = under_way.pop(draw.randrange(len(under_way)))
        following = source.next_after_finish(ended.time + 1)
        if following is not None:
            assert following.time == ended.time + 1 + think * scale
            under_way.append(following)
            seen += 1
        assert len(under_way) <= clients
    assert seen == count


ROWS = st.lists(st.tuples(st.floats(0, 500), st.integers(1, 2000), st.integers(0, 300)), min_size=1, max_size=12).map(
    lambda rows: sorted(rows, key=lambda row: row[0])
)


@given(ROWS)
def test_trace_files_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[float, int, int]]
) -> None:
    folder, began = tmp_path_factory.mktemp("trace"), datetime(2023, 11, 16, 18, tzinfo=UTC)
    azure = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    azure += [f"{(began + timedelta(seconds=t)).replace(tzinfo=None).isoformat(' ')},{p},{o}" for t, p, o in rows]
    (folder / "a.csv").write_text("\n".join(azure) + "\n")
    lines = [
        json.dumps({"timestamp": t * 1000, "input_length": p, "output_length": o, "hash_ids": [*range(-(-p // 512))]})
        for t, p, o in rows
    ]
    (folder / "m.jsonl").write_text("\n".join(lines))
    for name in ("a.csv", "m.jsonl"):
        found = list(read_trace(folder / name))
        assert [(a.prompt_tokens, a.output_tokens) for a in found] == [(p, max(1, o)) for _, p, o in rows]
        assert [a.time for a in found] == pytest.approx([t - rows[0][0] for t, _, _ in rows], abs=2e-6)


GOOD = '{"timestamp": 5, "input_length": 3, "output_length": 1, "hash_ids": [7]}'
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a,b\n1,2\n", 1, "begins no trace"),
        ("", 1, "begins no trace"),
        (HEAD.splitlines()[0], "", "has no request"),
        (HEAD + "2023-11-16 18:15:47,12\n", 3, "2 fields, not 3"),
        (HEAD + "yesterday,12,3\n", 3, "yesterday"),
        (HEAD + "2023-11-16 18:15:47,99999999999,3\n", 3, "99999999999 is not a count from 1"),
        (GOOD + "\n" + "[" * 100_000 + "\n", 2, "JSON nested more than 64 deep"),
        (GOOD + "\n" + GOOD[:-5] + "\n", 2, "not JSON: Expecting"),
        (HEAD + "2023-11-16 18:15:47,12.5,3\n", 3, "'12.5' is not a count"),
        (HEAD + "2023-11-16 18:15:47,0,3\n", 3, "0 is not a count from 1 to 16,777,216"),
        (HEAD + "2023-11-16 18:15:46,12,3\n", 3, "before the line above"),
        (GOOD + "\n{oops\n", 2, "oops"),
        (GOOD + "\n[1]\n", 2, "not a mapping"),
        (GOOD + "\n" + GOOD.replace("output", "out"), 2, "'output_length' is missing"),
        (GOOD + "\n" + GOOD.replace("[7]", "[7, 8]"), 2, "hash_ids must be a list of 1 ids for 3 tokens"),
        (GOOD + "\n" + GOOD.replace("5", "NaN"), 2, "timestamp nan"),
        (GOOD + "\n" + GOOD.replace("3", "true"), 2, "True is not a count"),
    ],
)
def test_a_corrupt_line_is_one_clear_error(tmp_path: Path, text: str, line: object, message: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(WorkbenchError) as error:
        list(read_trace(file))
    words = str(error.value)
    assert str(file) in words and message in words and "\n" not in words
    if line:
        assert f"line {line}:" in words and ("write" in words or "begin with" in words)


def test_missing_settings_are_reported(tmp_path: Path) -> None:
    refuses("cannot be read", lambda: list(read_trace(tmp_path / "none.csv")))
    for changes, message in (
        ({"requests": 3}, "arrivals: give poisson"),
        ({"arrivals": AtOnce()}, "requests: give one"),
    ):
        workload = TrafficSettings.model_validate({"lengths": FixedLengths(), **changes})
        refuses(message, source_of, workload)


def test_an_hour_of_the_generator_ends() -> None:
    made = arrivals_of(TrafficSettings(arrivals=AsRecorded()))
    assert 19_000 < len(made) < 20_000


def test_scaling_by_one_changes_nothing() -> None:
    arrival = Arrival(1.0, 700, 3, blocks=(1, 2))
    assert list(scale_arrivals([arrival])) == [arrival]
    assert next(scale_arrivals([arrival], length=0.5)) == Arrival(1.0, 350, 2, blocks=(1, 2), block_tokens=256)


SHARES = st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 9), min_size=1)


@given(LENGTHS, SHARES, st.dictionaries(st.integers(-2, 9), st.floats(0.1, 9), min_size=1), st.integers(0, 9))
def test_whose_a_request_is_depends_on_nothing_that_comes_after_it(
    lengths: object, tenants: dict, priorities: dict, seed: int
) -> None:
    given_ = {"lengths": lengths, "requests": 30, "seed": seed}
    plain = arrivals_of(traffic(**given_))
    workload = traffic(**given_, tenants=tenants, priorities=priorities)
    assert TrafficSettings.model_validate(workload.model_dump(mode="json")) == workload
    made = arrivals_of(workload)
    assert made[:7] == arrivals_of(workload.model_copy(update={"requests": 7}))
    assert [replace(each, tenant="", priority=0) for each in made] == plain
    assert {each.tenant for each in made} <= set(tenants) and {each.priority for each in made} <= set(priorities)
    for session in {each.session for each in made}:
        assert len({each.tenant for each in made if each.session == session}) == 1


def test_tenants_and_priorities_have_their_shares() -> None:
    workload = traffic(requests=4000, tenants={"a": 3, "b": 1}, priorities={0: 1, 5: 4})
    made = arrivals_of(workload)
    assert sum(each.tenant == "a" for each in made) / 4000 == pytest.approx(3 / 4, abs=0.03)
    assert sum(each.priority == 5 for each in made) / 4000 == pytest.approx(4 / 5, abs=0.03)
    request = request_from_arrival(made[0], "a", VOCAB)
    assert (request.tenant, request.priority) == (made[0].tenant, made[0].priority)
    refuses(
        r"tenants\.a: Input should be greater than 0",
        Experiment.from_values,
        {"question": "?", "workload": {"kind": "traffic", "tenants": {"a": 0}}},
    )


@given(st.integers(1, 60), st.integers(0, 5), st.floats(0, 2))
def test_deadlines_and_predictions_do_not_depend_on_the_number(count: int, seed: int, error: float) -> None:
    settings = {
        "lengths": ExponentialLengths(prompt=30, output=40), "seed": seed, "length": 0.5,
        "deadlines": {2.0: 1, 30.0: 2}, "prediction_error": error,
    }  # fmt: skip
    few, many = (arrivals_of(traffic(requests=n, **settings)) for n in (count, count + 20))
    assert few == many[:count]
    assert {arrival.deadline for arrival in few} <= {2.0, 30.0}
    assert all(arrival.predicted_tokens is not None and arrival.predicted_tokens >= 1 for arrival in few)
    if error == 0:
        assert all(arrival.predicted_tokens == arrival.output_tokens for arrival in few)
    request = request_from_arrival(few[0], "r", 100)
    assert (request.deadline, request.predicted_tokens) == (few[0].deadline, few[0].predicted_tokens)


def test_the_logarithm_of_a_prediction_has_the_error_that_was_asked_for() -> None:
    made = arrivals_of(traffic(lengths=FixedLengths(output=10_000), requests=2000, prediction_error=0.5))
    logs = [math.log((arrival.predicted_tokens or 0) / 10_000) for arrival in made]
    assert statistics.fmean(logs) == pytest.approx(0, abs=0.05) and statistics.stdev(logs) == pytest.approx(
        0.5, rel=0.1
    )


def test_traffic_without_deadlines_and_predictions_has_none() -> None:
    for arrival in arrivals_of(traffic(requests=3)):
        assert arrival.deadline is None and arrival.predicted_tokens is None
    once = "question: when?\nworkload: {kind: traffic, arrivals: {kind: at_once}, requests: 2, "
    read = Experiment.from_yaml(once + "deadlines: {2: 1, 0.5: 3}, prediction_error: 0.2}")
    assert Experiment.from_yaml(read.to_yaml()) == read
    assert isinstance(read.workload, TrafficSettings) and read.workload.deadlines == {2.0: 1.0, 0.5: 3.0}
    refuses("workload.*deadlines", lambda: Experiment.from_yaml(once + "deadlines: {-1: 1}}"))
