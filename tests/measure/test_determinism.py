"""One prompt in varying batches: what is counted, what is timed, and the verdict's rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compiled_kernels import Backend, backend_problems
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.measure import determinism as determinism_chart
from workbench.measure.chart import plotting_problem
from workbench.measure.compare_variants import run_comparison
from workbench.measure.determinism import measure_determinism, num_distinct_outputs

PRICE = {"prefill_tokens": 20, "context": 9, "batch": 3, "tokens": 4, "rounds": 2}
ASKED: dict[str, Any] = {
    "question": "the same?", "model": {"name": "shape:tiny", "dtype": "float32"}, "backend": "eager",
    "variants": {"off": {}}, "schedule": {"max_num_batched_tokens": 24},
    "workload": {
        "kind": "determinism", "prompts": 2, "prompt_tokens": 17, "output_tokens": 12, "runs": 4, "repeats": 2,
        "other_requests": 5, "other_request_tokens": 20, "price": PRICE,
    },
}  # fmt: skip
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


def test_without_the_mode_bits_vary() -> None:
    (row,) = measure_determinism(Experiment.from_values(ASKED)).rows
    assert row["varying_bits"] > 1 and row["same_bits"] == 1 and not row["batch_invariant"]
    assert row["prefill_s"] > 0 and "price_prefill" not in row


@pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")
def test_with_it_they_do_not_and_the_price_is_reported(tmp_path: Path) -> None:
    changed = {"off": {}, "on": {"backend": "mlir", "batch_invariant": True}, "also off": {"backend": "mlir"}}
    few = {"prompts": 1, "runs": 2, "other_requests": 2, "other_request_tokens": 4, "output_tokens": 3, "price": PRICE}
    work = {**ASKED["workload"], **few}
    judge = {"path": "experiments.determinism:judge"}
    experiment = Experiment.from_values({**ASKED, "variants": changed, "workload": work, "judge": judge})
    record = run_comparison(experiment, tmp_path, "determinism", progress=False)
    off, on, also = record.summary["rows"]
    assert on["varying_bits"] == on["varying_outputs"] == on["same_bits"] == 1 and on["batch_invariant"]
    assert on["price_prefill"] > 0 and on["price_decode_one"] > 0 and "price_prefill" not in off | also
    assert len(record.read_table("times.parquet").to_pylist()) == 3 * 2
    assert record.summary["verdicts"][0]["claim"] == "greedy-not-deterministic"
    if plotting_problem() is None:
        assert (record.path / "determinism.svg").read_text().startswith("<svg")
        drawn = determinism_chart.chart(record.summary["rows"], "the same?").to_dict()
        assert len(drawn["hconcat"]) == 2


def test_texts_want_a_tokenizer() -> None:
    texts = {**ASKED, "workload": {**ASKED["workload"], "prompts": ["def f("]}}
    with pytest.raises(WorkbenchError, match="has no tokenizer; say how many prompts"):
        measure_determinism(Experiment.from_values(texts))
