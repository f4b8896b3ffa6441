"""One prompt in varying batches: what is counted, what is timed, and the verdict's rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from compiled_kernels import Backend, backend_problems
from tests.helpers.refusals import refuses
from tests.measure.small import DETERMINISM, asked, is_drawn
from workbench.experiment.variants import every_variant
from workbench.measure import determinism
from workbench.measure.compare_variants import measure_variants, run_comparison
from workbench.measure.determinism import num_distinct_outputs

problem = backend_problems()[Backend.MLIR]


def test_answers_are_counted_by_prompt() -> None:
    rows = [
        {"prompt": 0, "batch_composition": "varying", "token_ids": [1, 2], "logprobs": [0.5, 0.5]},
        {"prompt": 0, "batch_composition": "varying", "token_ids": [1, 2], "logprobs": [0.5, 0.25]},
        {"prompt": 1, "batch_composition": "varying", "token_ids": [1, 3], "logprobs": [0.5, 0.5]},
        {"prompt": 1, "batch_composition": "same", "token_ids": [7, 7], "logprobs": [0.5, 0.5]},
    ]
    assert (num_distinct_outputs(rows, "varying", "token_ids"), num_distinct_outputs(rows, "varying", "logprobs")) == (
        1,
        2,
    )
    assert num_distinct_outputs(rows, "same", "token_ids") == 1


def test_a_price_of_sequences_that_never_decode_together_is_refused() -> None:
    few = asked(DETERMINISM, "workload.prompts=1", "workload.runs=1", "schedule.max_num_seqs=2")
    refuses("workload.price: 3 sequences never decode together; lower price.batch", measure_variants, few)


def test_without_the_mode_bits_vary() -> None:
    (row,) = measure_variants(asked(DETERMINISM)).rows
    assert row["varying_bits"] > 1 and row["same_bits"] == 1 and not row["batch_invariant"]
    assert row["prefill_s"] > 0 and "price_prefill" not in row


def test_a_price_is_over_the_variant_that_differs_by_the_mode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"far": 1.0, "on": 6.0, "off": 2.0, "alone": 5.0}
    backends = {"far": "eager", "on": "mlir", "off": "mlir", "alone": "inductor"}
    settings = {name: {"backend": each, "batch_invariant": name in ("on", "alone")} for name, each in backends.items()}
    experiment = asked(DETERMINISM, f"variants={json.dumps(settings)}")
    monkeypatch.setattr(determinism, "load_runners", lambda variants, on_progress: {name: name for name in variants})
    monkeypatch.setattr(
        determinism, "time_round", lambda settings, name, seed: dict.fromkeys(determinism.TIMED_PHASES, seconds[name])
    )
    price = cast(Any, experiment.workload).price
    costs, _ = determinism.measure_overhead(price, every_variant(experiment), 0, lambda line: None)
    assert {name: cost["price_prefill"] for name, cost in costs.items() if "price_prefill" in cost} == {"on": 3.0}
    assert {name: cost["prefill_s"] for name, cost in costs.items()} == seconds


@pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")
def test_with_it_they_do_not_and_the_price_is_reported(tmp_path: Path) -> None:
    few = "prompts=1", "runs=2", "other_requests=2", "other_request_tokens=4", "output_tokens=3"
    changed = "variants={'off': {}, 'on': {backend: mlir, batch_invariant: true}, also off: {backend: mlir}}"
    judge = "judge={path: 'experiments.determinism:judge'}"
    experiment = asked(DETERMINISM, changed, judge, *(f"workload.{each}" for each in few))
    record = run_comparison(experiment, tmp_path, "determinism", progress=False)
    off, on, also = record.summary["rows"]
    assert on["varying_bits"] == on["varying_outputs"] == on["same_bits"] == 1 and on["batch_invariant"]
    assert on["price_prefill"] > 0 and on["price_decode_one"] > 0 and "price_prefill" not in off | also
    assert len(record.read_table("times.parquet").to_pylist()) == 3 * 2
    assert record.summary["verdicts"][0]["claim"] == "greedy-not-deterministic"
    assert is_drawn(record)
