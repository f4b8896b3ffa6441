"""Requests alone on the machine, and what was said of them before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.measure.small import TINY, asked, is_drawn
from workbench.machine.ceilings import Ceiling, MachineCeilings
from workbench.measure import predictions as predictions_of
from workbench.measure.compare_variants import run_comparison
from workbench.measure.lengths import LengthsWorkload
from workbench.measure.predictions import MeasuredHardware, predict_variants, prefill_steps
from workbench.measure.serving import predict_serving
from workbench.model.cost import StepCostModel
from workbench.runs.record import Record

LENGTHS = "workload={kind: lengths, lengths: [[8, 4], [64, 4]], rounds: 2}"
VARIANTS = "variants={cache: {}, none: {executor.kind: uncached}}"
NAMES = ("cache", "none")


@pytest.fixture(autouse=True)
def ceilings(monkeypatch: pytest.MonkeyPatch) -> list:
    """As of some machine: what this one does is no matter here."""
    sizes_asked = []

    def some(*sizes: int, dtypes: tuple[str, ...], **_: object) -> MachineCeilings:
        sizes_asked.append(sizes)
        read = Ceiling("read", 1e10, "bytes/s", "", 1, 1, 1.0, sizes[0])
        return MachineCeilings((read,), (Ceiling("gemm", 1e11, "FLOP/s", "", 1, 1, 1.0, 1, dtype=dtypes[0]),))

    monkeypatch.setattr(predictions_of, "ceilings_for", some)
    return sizes_asked


def test_a_prediction_is_written_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    measure = LengthsWorkload.measure

    def measured(self, experiment, tell, predicted):
        (folder,) = tmp_path.iterdir()
        seen.append(json.loads((folder / "prediction.json").read_text()))
        return measure(self, experiment, tell, predicted)

    monkeypatch.setattr(LengthsWorkload, "measure", measured)
    record = run_comparison(asked(TINY, LENGTHS, VARIANTS), tmp_path, progress=False)
    rows = Record.open(record.path).summary["rows"]
    for row in rows:
        assert row["predicted"] == seen[0]["variants"][row["variant"]]
        for point, expected in zip(row["curve"], row["predicted"]["lengths"], strict=True):
            assert point["predicted_prefill_s"] == expected["prefill_s"] > 0
            assert min(point[key] for key in ("prefill_s", "decode_step_s", "decode_s", "e2el_s")) > 0
            share = expected["decode_bytes"] / point["decode_step_s"] / row["predicted"]["bytes_per_s"]
            assert point["decode_bytes_share"] == pytest.approx(share)
    assert is_drawn(record)


def test_without_a_cache_a_step_is_predicted_to_be_a_prefill() -> None:
    prediction = predict_variants(asked(TINY, LENGTHS, VARIANTS))
    assert prediction is not None
    cached, anew = (prediction["variants"][name]["lengths"][1] for name in NAMES)
    assert anew["decode_flops"] > 40 * cached["decode_flops"]  # but for the head, of 66 tokens
    assert anew["prefill_flops"] == cached["prefill_flops"]


def test_chunks_compute_what_the_whole_does() -> None:
    from workbench.model.shapes import named_shape

    cost = StepCostModel(named_shape("tiny"), 2, 2, 2)
    whole, cut = prefill_steps(cost, 100, 512), prefill_steps(cost, 100, 16)
    assert (len(whole), len(cut)) == (1, 7)
    assert sum(each.flops for each in cut) == pytest.approx(whole[0].flops)
    assert sum(each.bytes for each in cut) > whole[0].bytes


def test_batches_are_predicted_to_give_more_and_drafts_to_help_at_most_so_much() -> None:
    work = "workload={kind: random, requests: 8, prompt_tokens: 8, output_tokens: 16}"
    base = asked(TINY, work, "schedule.max_num_seqs=1", "measure.predict=true")
    many, here = base.with_("schedule.max_num_seqs=8"), MeasuredHardware()
    alone, together = predict_serving(base, here), predict_serving(many, here)
    assert together["output_tokens_per_s"] > alone["output_tokens_per_s"]
    drafts = predict_serving(base.with_("speculate={kind: prompt_lookup, num_speculative_tokens: 3}"), here)
    assert 1 < drafts["output_tokens_per_s"] / alone["output_tokens_per_s"] <= 4
    naive = predict_serving(base.with_("executor.kind=uncached"), here)
    assert naive["output_tokens_per_s"] < alone["output_tokens_per_s"]
    assert predict_variants(base.with_("measure.predict=false")) is None


def test_each_model_is_measured_once(ceilings: list) -> None:
    predict_variants(asked(TINY, LENGTHS, VARIANTS))
    assert len(ceilings) == 1
