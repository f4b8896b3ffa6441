"""The rules of the first release's experiments: numbers that make each claim hold, hold with limits, and fall."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments import (
    batch_size,
    model_size,
    naive_loop,
    no_cache,
    prefill_decode_length,
    sampling_texts,
    weight_formats,
)
from experiments.__main__ import main, names
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.experiment.variants import every_variant
from workbench.experiment.verdict import Verdict
from workbench.measure.sampled_texts import HELD_OUT_ROW

EXPERIMENTS = Path(batch_size.__file__).parent
NAMES = (
    "prefill_decode_length", "model_size", "batch_size", "no_cache", "weight_formats", "sampling_texts", "naive_loop",
)  # fmt: skip


def outcomes(found: list[Verdict]) -> dict[str, str]:
    assert all(each.rule and each.reason and each.says for each in found)
    return {each.claim: each.outcome for each in found}


@pytest.mark.parametrize("name", NAMES)
def test_they_can_be_read_and_have_judges(name: str) -> None:
    experiment = Experiment.from_file(EXPERIMENTS / f"{name}.yaml")
    assert Experiment.from_yaml(experiment.to_yaml()) == experiment
    every_variant(experiment)
    assert experiment.is_comparison and experiment.judge is not None
    assert experiment.judge.path == f"experiments.{name}:judge" and name in names()


def test_a_wrong_name_is_reported_with_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkbenchError, match="did you mean 'batch_size'"):
        main("batch_sise")
    main()
    assert capsys.readouterr().out.count("?") >= len(NAMES)


LENGTHS = (4, 16, 64, 128, 256, 512, 1024, 2048, 4096)


def lengths(
    prefill: Any, decode: Any, flops: float = 0.4, reads: tuple[float, float] = (0.1, 0.6), share: float = 0.6
) -> list[dict]:
    """Rows whose times are functions of the length; shares of ceilings; decode's share of the long request."""
    points = [
        {
            "prompt_tokens": n, "output_tokens": 16, "prefill_s": prefill(n), "predicted_prefill_s": 1e-3 * n,
            "decode_step_s": decode(n), "predicted_decode_step_s": 5e-3, "prefill_flops_share": flops,
            "prefill_bytes_share": reads[0], "decode_bytes_share": reads[1], "decode_flops_share": 0.02,
        }
        for n in LENGTHS
    ]  # fmt: skip
    asked = {"prompt_tokens": 1000, "output_tokens": 200, "decode_s": share, "e2el_s": 1.0}
    asked |= {"predicted_decode_s": share, "predicted_e2el_s": 1.0}
    return [{"variant": "as given", "curve": [*points, asked]}]


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (
            lengths(lambda n: 1e-3 * n, lambda n: 5e-3, share=0.7),
            ["refuted", "holds", "refuted", "holds", "holds-with-limits", "holds-with-limits", "holds"],
        ),
        (
            lengths(lambda n: 0.05, lambda n: 5e-3 * (1 + n / 1000), 0.2, (0.3, 0.2), 0.3),
            ["holds", "refuted", "refuted", "refuted", "refuted", "refuted", "refuted"],
        ),
        (
            lengths(lambda n: 0.05 + 1e-3 * n + 2e-7 * n * n, lambda n: 5e-3 * (1 + max(0, n - 2000) / 1000), share=0.6,
                    reads=(0.1, 0.3)),
            ["refuted", "holds-with-limits", "holds", "holds", "holds-with-limits", "refuted", "holds-with-limits"],
        ),
    ],
)  # fmt: skip
def test_lengths(rows: list[dict], wanted: list[str]) -> None:
    found = outcomes(prefill_decode_length.judge(rows))
    assert list(found) == [
        "prefill-flat", "prefill-linear", "prefill-quadratic", "prefill-compute-bound", "decode-flat-in-context",
        "decode-bandwidth-bound", "decode-dominates",
    ]  # fmt: skip
    assert list(found.values()) == wanted


def test_compute_bound_from_a_length_on() -> None:
    rows = lengths(lambda n: 1e-3 * n, lambda n: 5e-3)
    for point in rows[0]["curve"][:3]:
        point["prefill_flops_share"] = 0.05
    assert outcomes(prefill_decode_length.judge(rows))["prefill-compute-bound"] == "holds-with-limits"


def test_decode_flat_as_far_as_it_is_claimed_could_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_decode_length, "SAME", 2.0)
    rows = lengths(lambda n: 1e-3 * n, lambda n: 5e-3)
    assert outcomes(prefill_decode_length.judge(rows))["decode-flat-in-context"] == "holds"


def cached(cache: float, anew: float, ratio: float) -> list[dict]:
    """Powers of the length with the cache and without, and how many times as long without at the end."""

    def row(name: str, power: float, last: float) -> dict:
        points = [
            {"prompt_tokens": n, "decode_step_s": last * (n / 1000) ** power, "predicted_decode_step_s": 1e-3}
            for n in (64, 256, 1000)
        ]
        return {"variant": name, "curve": points}

    return [row("cache", cache, 1e-3), row("no cache", anew, ratio * 1e-3), row("naive", 1.5, 0.5)]


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        (cached(0.1, 1.3, 100), "holds"),
        (cached(0.1, 0.9, 100), "holds-with-limits"),
        (cached(0.1, 1.3, 5), "holds-with-limits"),
        (cached(0.1, 0.5, 100), "refuted"),
        (cached(1.3, 2.0, 100), "refuted"),
        (cached(0.1, 1.3, 0.9), "refuted"),
    ],
)
def test_without_a_cache(rows: list[dict], outcome: str) -> None:
    assert outcomes(no_cache.judge(rows)) == {"kv-linear-step": outcome}


@pytest.mark.parametrize(
    ("power", "outcome"),
    [(0.5, "holds"), (1.0, "refuted"), (None, "holds-with-limits")],
)
def test_sizes(power: float | None, outcome: str) -> None:
    sizes = (1e6, 8e6, 1.35e8, 1.1e9)
    times = [1.0, 2.0, 34.0, 280.0] if power is None else [size**power for size in sizes]
    rows = [
        {
            "variant": name,
            "parameters": size,
            "curve": [
                {
                    "e2el_s": t,
                    "predicted_e2el_s": t,
                    "decode_step_s": t,
                    "decode_bytes_share": 0.5,
                    "decode_flops_share": 0.02,
                }
            ],
        }
        for name, size, t in zip(model_size.NAMES, sizes, times, strict=True)
    ]
    assert outcomes(model_size.judge(rows)) == {"model-size-not-linear": outcome, "decode-bandwidth-bound": "holds"}


@pytest.mark.parametrize(
    ("reads", "flops", "outcome"),
    [
        ((0.9, 0.8, 0.6, 0.5), 0.02, "holds"),
        ((0.2, 0.3, 0.8, 0.9), 0.02, "holds-with-limits"),
        ((0.2, 0.3, 0.4, 0.49), 0.02, "refuted"),
        ((0.9, 0.9, 0.9, 0.9), 0.2, "refuted"),
    ],
)
def test_what_a_decode_step_waits_for(reads: tuple[float, ...], flops: float, outcome: str) -> None:
    rows = model_size.example_rows(0.5, reads)
    for row in rows:
        row["curve"][0]["decode_flops_share"] = flops
    found = model_size.bandwidth_bound(rows)
    assert found.outcome == outcome
    if outcome == "holds-with-limits":
        assert "of smollm2-135m, tinyllama-1.1b; not of demo-draft, demo" in found.limits


def batches(rates: Sequence, tpot: Sequence, ttft: Sequence, limited: tuple[float, float]) -> list[dict]:
    rows = [
        {"variant": name, "output_tokens_per_s": rate, "tpot_s_p50": wait, "ttft_s_p50": first}
        for name, rate, wait, first in zip(batch_size.SIZES, rates, tpot, ttft, strict=True)
    ]
    rows.append({"variant": batch_size.LIMITED, "output_tokens_per_s": limited[0], "ttft_s_p50": limited[1]})
    return [{**row, "predicted": row} for row in rows]


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (batches((1, 2, 3, 4, 5, 6, 7), range(1, 8), range(1, 8), (9, 20)), ["holds", "holds"]),
        (batches((1, 2, 3, 4, 5, 6, 7), range(1, 8), range(1, 8), (5, 20)), ["holds", "holds-with-limits"]),
        (batches((1, 1.2, 1.3, 1.4, 1.5, 1.4, 1.3), range(1, 8), (1,) * 7, (1, 2)), ["holds-with-limits", "refuted"]),
        (batches((1, 1, 1, 1, 1, 1, 1), (1,) * 7, (1,) * 7, (1, 1)), ["refuted", "refuted"]),
    ],
)
def test_batches(rows: list[dict], wanted: list[str]) -> None:
    found = outcomes(batch_size.judge(rows))
    assert list(found) == ["batch-amortises", "ttft-vs-throughput"] and list(found.values()) == wanted


@pytest.mark.parametrize(
    ("lost", "outcome"),
    [
        ((1e-4, 2e-3, 0.02), "holds"),
        ((1e-4, 2e-3, 0.2), "holds-with-limits"),
        ((1e-4, 0.1, 0.02), "refuted"),
        ((0.02, 2e-3, 0.02), "refuted"),
    ],
)
def test_weights(lost: tuple[float, float, float], outcome: str) -> None:
    kept = (weight_formats.REFERENCE, weight_formats.FULL, weight_formats.INT8, weight_formats.INT4)
    rows = [
        {"variant": name, "bits_per_byte": 0.7 * (1 + more), "kl_mean": 1e-3, "decode_tokens_per_s": {"128": 10.0},
         "predicted": {"decode_tokens_per_s": {"128": 20.0}}}
        for name, more in zip(kept, (0, *lost), strict=True)
    ]  # fmt: skip
    assert outcomes(weight_formats.judge(rows)) == {"weights-quality": outcome}


def texts(
    wild: float = 1.6, spread: int = 1, greedy: tuple[float, float, bool] = (0.9, 0.8, True),
    few: tuple[float, float] = (0.7, 0.8),
) -> list[dict]:  # fmt: skip
    """Texts are incoherent from temperature `wild` on; greedy repeats, loops and comes again; top_k 2 and 4 loop and
    repeat so much."""
    came = {"bits_per_byte": 1.0, "repeated_4": 0.2, "looped": 0.0, "most_likely": 0.6}
    rows = [{"variant": HELD_OUT_ROW, **came}]
    for place, name in enumerate(("greedy", *sampling_texts.COOL, *sampling_texts.HOT)):
        heat = 0.0 if name == "greedy" else float(name.split()[1])
        rows.append({"variant": name, **came, "bits_per_byte": 3.0 if heat >= wild else 1.1,
                     "predicted": {"drawn_entropy": float(spread * place)}})  # fmt: skip
    rows[1] |= {"most_likely": 1.0, "repeated_4": greedy[0], "looped": greedy[1], "repeated_alike": greedy[2]}
    for name in sampling_texts.TOP_K:
        rows.append({"variant": name, **came, "looped": few[0], "repeated_4": few[1]})
    return rows


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (texts(), ["holds", "holds", "holds"]),
        (texts(wild=1.2, few=(0.2, 0.1), greedy=(0.9, 0.1, True)), ["holds-with-limits"] * 3),
        (texts(wild=9, few=(0.05, 0.2), greedy=(0.25, 0.0, True)), ["refuted"] * 3),
        (texts(spread=-1, few=(0.0, 0.5), greedy=(0.9, 0.9, False)), ["refuted", "holds-with-limits", "refuted"]),
    ],
)
def test_texts(rows: list[dict], wanted: list[str]) -> None:
    found = outcomes(sampling_texts.judge(rows))
    assert list(found) == ["sample-temperature", "sample-topk-loops", "sample-greedy-repeats"]
    assert list(found.values()) == wanted


@pytest.mark.parametrize(
    ("rates", "outcome"),
    [((1, 5, 10, 12, 40, 50), "holds"), ((1, 5, 10, 12, 40, 30), "holds-with-limits"), ((1, 2, 3, 4, 5, 6), "refuted")],
)
def test_the_ladder(rates: tuple, outcome: str) -> None:
    rows = [
        {"variant": name, "output_tokens_per_s": rate, "predicted": {"output_tokens_per_s": rate}}
        for name, rate in zip(naive_loop.LADDER, rates, strict=True)
    ]
    assert outcomes(naive_loop.judge(rows)) == {"naive-against-everything": outcome}
