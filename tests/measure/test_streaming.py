"""Answers streamed or waited for: the client's text is the runner's, however it came, and what is made of its times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.measure.small import STREAMING, asked
from workbench.engine.runner import Runner, generate
from workbench.experiment.build import runner_for
from workbench.experiment.experiment import Experiment
from workbench.measure import streaming as streaming_prediction
from workbench.measure.compare_variants import run_comparison
from workbench.measure.streaming import StreamingClient, deliver, predicted_rates, random_requests, run_streaming_round
from workbench.reports.variants_table import variant_tables
from workbench.trace.events import Decoded, Finished


@pytest.fixture(scope="module")
def runner() -> Runner:
    return runner_for(asked(STREAMING))


def variant(name: str) -> Experiment:
    return asked(STREAMING).variant(name)


@pytest.mark.parametrize("delivery", ["whole", "events", "stream"])
def test_the_client_has_the_whole_text(delivery: str, runner: Runner) -> None:
    requests = random_requests(variant(delivery), runner.model.spec.vocab_size, 1)
    texts = {
        name: end.output_text for name, end in generate(runner, random_requests(variant("events"), 4096, 1)).items()
    }
    events = list(runner.stream(requests))
    with StreamingClient() as client:
        for event in events:
            deliver(event, variant(delivery).workload.delivery, client)  # type: ignore[union-attr]
    assert {name: found[3] for name, found in client.received.items()} == texts
    shown = sum(1 for event in events if isinstance(event, Decoded) and event.text)
    assert bool(shown) == (delivery != "whole")
    assert sum(found[2] for found in client.received.values()) == (shown + 3 if delivery == "stream" else 3)


def test_a_round_is_timed_from_the_arrival_to_the_last_message(runner: Runner) -> None:
    found = {name: run_streaming_round(runner, variant(name), 1) for name in ("whole", "stream")}
    for each in found.values():
        assert 0 < each["visible_s_p50"] <= each["e2el_s_p50"]
        assert each["output_tokens_per_s"] == pytest.approx(36 / each["seconds"])
    whole, stream = found["whole"], found["stream"]
    assert whole["visible_s_p50"] == whole["e2el_s_p50"] and whole["messages"] == 3
    assert stream["visible_s_p50"] < stream["e2el_s_p50"] and stream["messages"] > 3
    assert not runner.has_unfinished_requests


def test_handling_is_predicted_without_a_model(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_prediction, "predicted_step_seconds", lambda experiment, at_once: 1e-3 * at_once)
    monkeypatch.setattr(streaming_prediction, "SAMPLE", 64)
    found = predicted_rates(variant("stream"), runner)
    assert found["step_s"] == 2e-3 and found["handling_s_per_token"] > 0
    assert found["output_tokens_per_s"] == pytest.approx(1 / (1e-3 + found["handling_s_per_token"]))


def test_a_comparison_has_a_row_a_delivery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_prediction, "predicted_step_seconds", lambda experiment, at_once: 1e-3)
    record = run_comparison(asked(STREAMING), tmp_path, progress=False)
    rows = record.summary["rows"]
    assert [row["variant"] for row in rows] == ["whole", "events", "stream"]
    assert all(len(row["rates"]) == 2 for row in rows)
    (found,) = variant_tables(rows)
    for heading in ("first text seen p50", "throughput", "predicted throughput", "messages"):
        assert heading in found.headings


def test_a_client_that_is_left_is_not_waited_for() -> None:
    with pytest.raises(KeyError), StreamingClient() as client:
        client.send("a", "x", None)
        raise KeyError
    assert client.received == {}
    with StreamingClient() as client:
        deliver(Finished(0.0, "a", "rest", reason="length", output_text="whole, rest"), "stream", client)
    assert client.received["a"][3] == "rest"
