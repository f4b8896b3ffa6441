"""One prompt in varying company: what is counted, what is timed, and the verdict's rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compiled_kernels import Lane, lane_problems
from experiments import determinism
from workbench.errors import WorkbenchError
from workbench.study import company_chart
from workbench.study.company import company, distinct
from workbench.study.comparison import run_comparison
from workbench.study.experiment import Experiment
from workbench.study.pareto import plotting_problem

PRICE = {"prefill_tokens": 20, "context": 9, "batch": 3, "tokens": 4, "rounds": 2}
ASKED: dict[str, Any] = {
    "question": "the same?", "model": {"name": "shape:tiny", "dtype": "float32"}, "lane": "eager",
    "variants": {"off": {}}, "schedule": {"max_num_batched_tokens": 24},
    "workload": {
        "kind": "company", "prompts": 2, "prompt_tokens": 17, "output_tokens": 12, "runs": 4, "repeats": 2,
        "companions": 5, "companion_tokens": 20, "price": PRICE,
    },
}  # fmt: skip
problem = lane_problems()[Lane.MLIR]


def test_answers_are_counted_by_prompt() -> None:
    rows = [
        {"prompt": 0, "company": "varying", "token_ids": [1, 2], "logprobs": [0.5, 0.5]},
        {"prompt": 0, "company": "varying", "token_ids": [1, 2], "logprobs": [0.5, 0.25]},
        {"prompt": 1, "company": "varying", "token_ids": [1, 3], "logprobs": [0.5, 0.5]},
        {"prompt": 1, "company": "same", "token_ids": [7, 7], "logprobs": [0.5, 0.5]},
    ]
    assert (distinct(rows, "varying", "token_ids"), distinct(rows, "varying", "logprobs")) == (1, 2)
    assert distinct(rows, "same", "token_ids") == 1


def test_without_the_mode_bits_vary() -> None:
    (row,) = company(Experiment.of(ASKED)).rows
    assert row["varying_bits"] > 1 and row["same_bits"] == 1 and not row["batch_invariant"]
    assert row["prefill_s"] > 0 and "price_prefill" not in row


@pytest.mark.skipif(problem is not None, reason=f"lane mlir: {problem}")
def test_with_it_they_do_not_and_the_price_is_told(tmp_path: Path) -> None:
    changed = {"off": {}, "on": {"lane": "mlir", "batch_invariant": True}, "also off": {"lane": "mlir"}}
    few = {"prompts": 1, "runs": 2, "companions": 2, "companion_tokens": 4, "output_tokens": 3, "price": PRICE}
    work = {**ASKED["workload"], **few}
    judge = {"path": "experiments.determinism:judge"}
    experiment = Experiment.of({**ASKED, "variants": changed, "workload": work, "judge": judge})
    record = run_comparison(experiment, tmp_path, "company", progress=False)
    off, on, also = record.summary["rows"]
    assert on["varying_bits"] == on["varying_outputs"] == on["same_bits"] == 1 and on["batch_invariant"]
    assert on["price_prefill"] > 0 and on["price_decode_one"] > 0 and "price_prefill" not in off | also
    assert len(record.read_table("times.parquet").to_pylist()) == 3 * 2
    assert record.summary["verdicts"][0]["claim"] == "greedy-not-deterministic"
    if plotting_problem() is None:
        assert (record.path / "company.svg").read_text().startswith("<svg")
        told = company_chart.chart(record.summary["rows"], "the same?").to_dict()
        assert len(told["hconcat"]) == 2


def test_texts_want_a_tokenizer() -> None:
    texts = {**ASKED, "workload": {**ASKED["workload"], "prompts": ["def f("]}}
    with pytest.raises(WorkbenchError, match="has no tokenizer; say how many prompts"):
        company(Experiment.of(texts))


def found(outputs: int, bits: int, same: int, on_bits: int = 1) -> list[dict[str, Any]]:
    row = {"variant": "off", "batch_invariant": False, "varying_outputs": outputs, "varying_bits": bits}
    on = {"variant": "on", "batch_invariant": True, "varying_outputs": 1, "varying_bits": on_bits, "same_bits": 1}
    row, on = (each | {"same_outputs": 1} for each in (row, on))
    return [row | {"same_bits": same}, on | {"price_prefill": 1.0, "price_decode_one": 1.1, "price_decode_many": 1.2}]


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        (found(2, 5, 1), "holds"),
        (found(1, 5, 1), "holds-with-limits"),
        (found(2, 5, 2), "holds-with-limits"),
        (found(1, 1, 1), "refuted"),
    ],
)
def test_the_rule(rows: list[dict[str, Any]], outcome: str) -> None:
    verdict, kept = determinism.judge(rows)
    assert (verdict.claim, verdict.outcome) == ("greedy-not-deterministic", outcome)
    assert kept.claim == "exact-cache"
    assert "decode of one 1.10" in verdict.because
