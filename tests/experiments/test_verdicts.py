"""The rules of the experiments' verdicts: numbers that make a claim hold, hold with limits, and fall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments import (
    agent,
    apart,
    batching,
    chunked_prefill,
    determinism,
    disaggregation,
    fleet_prediction,
    kv_evict,
    kv_groups,
    kv_precision,
    paging_waste,
    prefix_reuse,
    queue_tail,
    routing,
    schedule_price,
    speculation,
    streaming,
    thinking,
    window_span,
)
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.experiment.variants import every_variant
from workbench.experiment.verdict import Verdict, variant_row, verdicts
from workbench.request import CustomPart

EXPERIMENTS = Path(kv_precision.__file__).parent
NAMES = (
    "kv_precision", "kv_evict", "window_span", "kv_groups", "prefix_reuse", "determinism", "disaggregation", "routing",
    "paging_waste", "batching", "chunked_prefill", "streaming", "queue_tail",
    "agent", "thinking", "apart", "fleet_prediction",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_they_can_be_read_and_every_variant_is_one(name: str) -> None:
    experiment = Experiment.from_file(EXPERIMENTS / f"{name}.yaml")
    assert Experiment.from_yaml(experiment.to_yaml()) == experiment
    assert len(every_variant(experiment)) >= 2 and experiment.is_comparison
    assert experiment.judge is not None and experiment.judge.path == f"experiments.{name}:judge"


def precision(
    stored: tuple[float, float], whole: tuple[float, float], kl: tuple[float, float], fit: tuple
) -> list[dict]:
    rows = [("bfloat16", 1.0, 1.0, 7e-5, fit[0])]
    rows += [(f"int{8 - 4 * i}", stored[i], whole[i], 7e-5 + kl[i], fit[1 + i]) for i in range(2)]
    names = ("variant", "stored_bytes_per_token", "bytes_per_token", "kl_mean", "sequences")
    return [dict(zip(names, row, strict=True)) | {"kv_tokens": 1000, "sequence_tokens": 4096} for row in rows]


@pytest.mark.parametrize(
    ("rows", "outcomes"),
    [
        (precision((0.53, 0.28), (0.54, 0.29), (1e-4, 5e-3), (10, 18, 35)), ["holds", "holds"]),
        (precision((0.53, 0.28), (0.60, 0.37), (1e-4, 5e-3), (10, 16, 20)), ["holds-with-limits"] * 2),
        (precision((0.53, 0.28), (0.54, 0.29), (1e-4, 5e-2), (10, 18, 30)), ["holds-with-limits"] * 2),
        (precision((0.60, 0.28), (0.60, 0.29), (1e-4, 5e-3), (10, 17, 17)), ["refuted", "refuted"]),
        (precision((0.53, 0.28), (0.54, 0.29), (2e-3, 5e-3), (10, 18, 35)), ["refuted", "holds"]),
    ],
)
def test_precision(rows: list[dict], outcomes: list[str]) -> None:
    found = kv_precision.judge(rows)
    assert [each.claim for each in found] == ["kv-quant-size", "kv-quant-concurrency"]
    assert [each.outcome for each in found] == outcomes
    assert all(each.rule and each.reason and each.says for each in found)


def windows(gains: dict[float, float], left: float = 0.0, pages: float = 1.0) -> list[dict[str, Any]]:
    """Rows in which names before a window keep `left` of the full model's gain, and hold `pages` times too much."""

    def copying(span: int | None) -> dict:
        found = {}
        for depth, gain in gains.items():
            distance = 900 * (1 - depth) + 20
            seen = span is None or distance <= span
            found[str(depth)] = {"gain": gain if seen else left * gain, "distance": distance}
        return found

    rows: list[dict[str, Any]] = [
        {"variant": "float32", "stored_bytes_per_token": 10.0, "kv_bytes": 10240, "copying": copying(None)}
    ]
    for name, span in window_span.WINDOWS.items():
        rows.append({"variant": name, "kv_bytes": pages * (span + 16) * 10.0, "copying": copying(span)})
    return rows


NEARER = {0.0: 2.8, 0.25: 4.9, 0.5: 5.8, 0.75: 6.2, 1.0: 7.1}


@pytest.mark.parametrize(
    ("rows", "outcomes"),
    [
        (windows(NEARER), ["holds", "refuted"]),
        (windows(NEARER, left=0.5), ["holds-with-limits", "refuted"]),
        (windows(NEARER, pages=2.0), ["refuted", "refuted"]),
        (windows({0.0: 6.0, 0.5: 3.0, 1.0: 7.0}), ["holds", "holds"]),
        (windows({0.0: 6.0, 0.5: 5.6, 1.0: 7.0}), ["holds", "holds-with-limits"]),
        (windows({0.0: 7.0, 0.5: 6.9, 1.0: 7.1}), ["holds", "refuted"]),
    ],
)
def test_windows_and_the_middle(rows: list[dict], outcomes: list[str]) -> None:
    found = window_span.judge(rows)
    assert [each.claim for each in found] == ["kv-window", "lost-in-the-middle"]
    assert [each.outcome for each in found] == outcomes


def groups(sizes: tuple[float, float, float]) -> list[dict]:
    rows = zip(kv_groups.GROUPS, sizes, strict=True)
    return [{"variant": n, "bytes_per_token": s, "stored_bytes_per_token": s, "kl_mean": 0.1} for n, s in rows]


def test_groups() -> None:
    right = groups((4 * 3072.0, 2 * 3072.0, 3072.0))
    assert [each.outcome for each in kv_groups.judge(right)] == ["holds", "holds", "holds-with-limits"]
    wrong = groups((4 * 3072.0, 2 * 3072.0, 2 * 3072.0))
    assert [each.outcome for each in kv_groups.judge(wrong)] == ["refuted", "refuted", "holds-with-limits"]
    assert "41.9 GB at 128,000: right is A" in kv_groups.llama(kv_groups.llama_sizes()).reason


def test_the_count_of_llama_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_groups, "SOURCES", {"A": 400, "E": 30})
    assert kv_groups.llama(kv_groups.llama_sizes()).outcome == "refuted"
    monkeypatch.setattr(kv_groups, "SOURCES", {"A": 40, "E": 42})
    assert kv_groups.llama(kv_groups.llama_sizes()).outcome == "holds"


@pytest.mark.parametrize(
    ("ttft", "rate", "outcomes"),
    [
        (0.05, 5.0, ["holds-with-limits", "holds"]),
        (0.20, 8.0, ["holds", "holds-with-limits"]),
        (0.35, 3.5, ["holds", "holds"]),
        (0.50, 2.0, ["holds-with-limits", "holds-with-limits"]),
        (0.95, 1.0, ["refuted", "refuted"]),
    ],
)
def test_prefixes(ttft: float, rate: float, outcomes: list[str]) -> None:
    rows = [
        {"variant": "computed", "ttft_s": 1.0, "requests_per_s": 1.0},
        {"variant": "reused", "ttft_s": ttft, "requests_per_s": rate, "cached_tokens": 960.0, "same_tokens": True},
    ]
    assert [each.outcome for each in prefix_reuse.judge(rows)] == outcomes


@pytest.mark.parametrize(
    ("waste", "sequences", "outcome"),
    [(0.01, 9.0, "holds"), (0.1, 9.0, "holds-with-limits"), (0.01, 1.3, "holds-with-limits"), (0.2, 9.0, "refuted")],
)
def test_pages(waste: float, sequences: float, outcome: str) -> None:
    figures = {"output_tokens_per_s": 1.0}
    rows = [
        {"variant": "the longest text reserved", "cache_waste": 0.9, "sequences_mean": 1.0, **figures},
        {"variant": "pages of 16", "cache_waste": waste, "sequences_mean": sequences, **figures},
    ]
    assert [each.outcome for each in paging_waste.judge(rows)] == [outcome]


@pytest.mark.parametrize(
    ("median", "tail", "outcome"),
    [
        (0.3, 0.4, "holds"),
        (0.3, 0.9, "holds-with-limits"),
        (0.8, 0.8, "holds-with-limits"),
        (0.9, 0.7, "refuted"),
        (1.5, 1.5, "refuted"),
    ],
)
def test_routes(median: float, tail: float, outcome: str) -> None:
    rows = [
        {"variant": name, "ttft_s_p50": p50, "ttft_s_p99": p99, "cache_hit_rate": 0.3}
        for name, p50, p99 in (("least loaded", 1, 1), ("session sticky", 1, 1), ("prefix aware", median, tail))
    ]
    assert [each.outcome for each in routing.judge(rows)] == [outcome]


def pools(gaps: tuple[float, float, float], kept: tuple[int, int, int]) -> list[dict]:
    """Gaps of whole prompts, of chunks and of separate pools, and how many of three loads each serves."""
    rows = []
    for name, gap, loads in zip(("whole prompts", "chunks of 512", "5 for prompts and 3"), gaps, kept, strict=True):
        curve = [{"value": load, "slo_attainment": 1.0 if load <= loads else 0.5} for load in (1, 2, 3)]
        rows.append({"variant": name, "longest_gap_s_p99": gap, "ttft_s_p50": 0.1, "curve": curve})
    return [*rows, {**rows[-1], "variant": "4 for prompts and 4"}]


@pytest.mark.parametrize(
    ("rows", "outcomes"),
    [
        (pools((1.0, 0.1, 0.1), (1, 2, 2)), ["holds", "holds"]),
        (pools((1.0, 0.5, 0.1), (1, 2, 1)), ["holds-with-limits", "holds-with-limits"]),
        (pools((1.0, 0.9, 0.9), (1, 1, 3)), ["refuted", "refuted"]),
    ],
)
def test_interference(rows: list[dict], outcomes: list[str]) -> None:
    found = disaggregation.judge(rows)
    assert [each.claim for each in found] == ["chunked-prefill", "pd-disaggregation"]
    assert [each.outcome for each in found] == outcomes
    assert all(each.rule and each.reason and each.says for each in found)


@pytest.mark.parametrize(
    ("gap", "kept", "outcome"), [(0.05, 0.9, "holds"), (0.05, 0.8, "refuted"), (0.06, 0.9, "refuted")]
)
def test_pools_that_were_measured_pay_where_both_the_gap_and_the_goodput_say_so(
    gap: float, kept: float, outcome: str
) -> None:
    predicted = {"longest_gap_s_p99": 0.2, "slo_attainment": 1.0}
    rows = [
        {"variant": "one pool, chunks", "longest_gap_s_p99": 0.1, "slo_attainment": 0.9, "prediction": predicted},
        {"variant": "two pools, shared memory", "longest_gap_s_p99": gap, "slo_attainment": kept},
    ]
    found = apart.pays(rows)
    assert found.outcome == outcome and "predicted nothing" in found.reason
    found = apart.pays([rows[0], {**rows[1], "prediction": predicted}])
    assert "predicted 200 ms against 200 ms, and 100% against 100%" in found.reason


@pytest.mark.parametrize(
    ("factors", "outcome"),
    [((1.0, 1.19, 0.81, 1.0), "holds"), ((1.0, 1.21, 0.79, 1.0), "holds-with-limits"), ((2.0, 2, 2, 1), "refuted")],
)
def test_predictions_of_fleets(factors: tuple[float, ...], outcome: str) -> None:
    measured = dict.fromkeys(fleet_prediction.JUDGED, 0.1)
    predicted = {name: 0.1 * factor for name, factor in zip(fleet_prediction.JUDGED, factors, strict=True)}
    (found,) = fleet_prediction.judge([{"variant": "two replicas", **measured, "prediction": predicted}])
    assert found.outcome == outcome
    assert (outcome == "holds") == ("off:" not in found.reason)
    with pytest.raises(WorkbenchError, match="has no prediction"):
        fleet_prediction.judge([{"variant": "two replicas", **measured}])


def tails(azure: list[tuple[float, float]], mooncake: list[tuple[float, float]]) -> list[dict]:
    """Rows of the two traffics: median and p99 TTFT of short requests at rising loads."""
    return [
        {"variant": name, "curve": [
            {"value": load, queue_tail.MEDIAN: median, queue_tail.TAIL: tail}
            for load, (median, tail) in enumerate(points, 1)]}
        for name, points in zip(queue_tail.TRAFFICS, (azure, mooncake), strict=True)
    ]  # fmt: skip


SPIKES, GROWS = [(1, 2), (1.5, 20), (9, 90)], [(1, 2), (1.9, 6), (9, 90)]


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        (tails(SPIKES, SPIKES), "holds"),
        (tails(GROWS, SPIKES), "holds-with-limits"),
        (tails(GROWS, GROWS), "refuted"),
        (tails([(1, 2), (9, 90)], [(1, 2), (2.5, 20), (1, 20)]), "refuted"),
    ],
)
def test_a_tail_grows_before_the_median(rows: list[dict], outcome: str) -> None:
    """At the last load before the median is no longer fine, not at the load that suits best."""
    (found,) = queue_tail.judge(rows)
    assert (found.claim, found.outcome) == ("queue-p99", outcome)
    assert all((found.rule, found.reason, found.says, found.changed))


def strict(rows, most: float = 1.0) -> list[Verdict]:
    good = all(row["kl_mean"] <= most for row in rows)
    return [Verdict("mine", "small", f"at most {most}", "holds" if good else "refuted", "so")]


def nonsense(rows) -> list[str]:
    return ["holds"]


def test_a_judge_of_ones_own_with_arguments() -> None:
    rows = [{"variant": "a", "kl_mean": 0.5}]
    path = f"{__name__}:strict"
    assert verdicts(CustomPart(path=path), rows)[0].outcome == "holds"
    assert verdicts(CustomPart(path=path, arguments={"most": 0.1}), rows)[0].outcome == "refuted"
    assert verdicts(None, rows) == []
    with pytest.raises(WorkbenchError, match="gives str, must give Verdict values"):
        verdicts(CustomPart(path=f"{__name__}:nonsense"), rows)
    with pytest.raises(WorkbenchError, match="needs a variant 'b'; this run has a"):
        variant_row(rows, "b")


def evictions(bits: dict[str, tuple[float, float]], left: tuple[float, float], pages: float = 1.0) -> list[dict]:
    """Rows of bits a byte by policy, for both budgets; SnapKV keeps `left` of the gain on names far back."""
    copied = {"0.0": {"gain": 4.0, "distance": 800.0}, "1.0": {"gain": 7.0, "distance": 19.0}}
    full = {"stored_bytes_per_token": 10, "kv_tokens": 1000, "bits_per_byte": 0.6, "copying": copied}
    rows: list[dict] = [{"variant": "float32", **full}]
    for i, budget in enumerate(kv_evict.BUDGETS):
        far = {"0.0": {"gain": 4.0 * left[i], "distance": 800.0}, "1.0": {"gain": 7.0, "distance": 19.0}}
        for policy in (*kv_evict.ALWAYS, "SnapKV"):
            measured = {"kv_bytes": 10 * budget * pages, "bits_per_byte": bits.get(policy, (1, 1))[i], "copying": far}
            rows.append({"variant": f"{policy} {budget}", **measured})
    return rows


@pytest.mark.parametrize(
    ("rows", "outcomes"),
    [
        (evictions({"heavy hitters": (0.8, 0.7), "sinks + recent": (0.9, 0.8)}, (0.6, 0.9)), ["holds"] * 4),
        (
            evictions({"heavy hitters": (0.8, 0.9), "sinks + recent": (0.9, 0.8)}, (0.0, 0.9)),
            ["holds", "holds-with-limits", "holds", "holds-with-limits"],
        ),
        (
            evictions({"heavy hitters": (1.0, 1.1), "sinks + recent": (1.0, 0.999)}, (0.05, 0.09), pages=1.3),
            ["refuted"] * 4,
        ),
    ],
)
def test_eviction(rows: list[dict], outcomes: list[str]) -> None:
    found = kv_evict.judge(rows)
    assert [each.claim for each in found] == ["kv-evict-bounded", "kv-heavy-hitters", "kv-sinks", "kv-snapkv"]
    assert [each.outcome for each in found] == outcomes
    assert all(each.rule and each.reason and each.says for each in found)


def batches(
    rates: tuple[float, ...], tpot: tuple[float, float], static: float, ttft: float, padded: float = 4.0
) -> list[dict]:
    """Tokens a second of 1 to 16 at once and of the static batch, TPOT of one and of 16, TTFT of continuous where the
    static batch has 1."""
    rows = [
        {"variant": name, "output_tokens_per_s": rate, "tpot_s_p50": tpot[0], "e2el_s_p50": 1.0}
        for name, rate in zip(batching.SIZES.values(), rates, strict=True)
    ]
    rows[-1] |= {"tpot_s_p50": tpot[1], "ttft_s_p50": ttft, "ttft_s_p99": 2.0}
    other = {"e2el_s_p50": 1.0, "ttft_s_p50": 1.0, "ttft_s_p99": 2.0}
    others = {"static": static, "padded": padded}
    return [*rows, *({"variant": name, "output_tokens_per_s": rate, **other} for name, rate in others.items())]


@pytest.mark.parametrize(
    ("rows", "outcomes"),
    [
        (batches((1, 2, 3, 4, 5), (0.1, 0.2), 2.4, 0.5), ["holds", "holds"]),
        (batches((1, 2, 3, 4, 5), (0.1, 0.2), 2.4, 1.5), ["holds-with-limits", "holds"]),
        (batches((1, 2, 3, 4, 5), (0.1, 0.1), 4.0, 0.5), ["holds-with-limits", "holds-with-limits"]),
        (batches((1, 2, 3, 2.9, 5), (0.1, 0.2), 4.9, 0.5), ["refuted", "holds-with-limits"]),
        (batches((1, 2, 3, 4, 5), (0.1, 0.2), 4.9, 0.5, padded=2.4), ["holds-with-limits", "holds"]),
        (batches((1, 1.2, 1.3, 1.4, 1.5), (0.1, 0.2), 0.5, 0.5), ["holds", "holds-with-limits"]),
        (batches((1, 1, 1, 1, 1), (0.1, 1.6), 2.0, 0.5), ["refuted", "refuted"]),
    ],
)
def test_batches(rows: list[dict], outcomes: list[str]) -> None:
    found = batching.judge(rows)
    assert [each.claim for each in found] == ["continuous-vs-static", "batch-amortises"]
    assert [each.outcome for each in found] == outcomes
    assert all(each.rule and each.reason and each.says for each in found)


def interruptions(gaps: tuple[float, float, float]) -> list[dict]:
    """The longest gaps of whole prompts and both chunks."""
    others = {"ttft_s": 1.0, "behind_ttft_s": 1.0, "seconds": 3.0}
    names = (chunked_prefill.UNDISTURBED, chunked_prefill.WHOLE, *chunked_prefill.CHUNKED)
    return [{"variant": n, "longest_gap_s": g, **others} for n, g in zip(names, (0.05, *gaps), strict=True)]


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        (interruptions((2.0, 0.9, 0.5)), "holds"),
        (interruptions((2.0, 0.6, 0.9)), "holds"),
        (interruptions((2.0, 1.9, 1.5)), "holds-with-limits"),
        (interruptions((2.0, 1.9, 1.9)), "refuted"),
        (interruptions((2.0, 2.5, 3.0)), "refuted"),
    ],
)
def test_a_long_prompt(rows: list[dict], outcome: str) -> None:
    (found,) = chunked_prefill.judge(rows)
    assert (found.claim, found.outcome) == ("chunked-prefill", outcome)
    assert found.rule and found.reason and found.says


def streams(whole: list[float], stream: list[float], total: float, first: float) -> list[dict]:
    """Rates by round, and when a client sees the last text (against 2 s) and the first."""
    rates = {"whole": whole, "events": whole, "stream": stream}
    rows = [
        {"variant": name, "rates": each, "output_tokens_per_s": each[0], "visible_s_p50": 2.0, "e2el_s_p50": 2.0,
         "predicted_output_tokens_per_s": 5000.0, "handling_s_per_token": 1e-6}
        for name, each in rates.items()
    ]  # fmt: skip
    rows[2] |= {"visible_s_p50": first, "e2el_s_p50": total, "handling_s_per_token": 2e-5}
    return rows


@pytest.mark.parametrize(
    ("rows", "outcomes"),
    [
        (streams([110, 108, 109], [100, 100, 101], 2.05, 0.02), ["holds", "holds"]),
        (streams([110, 110, 110, 99, 99], [100] * 5, 2.3, 0.02), ["holds-with-limits"] * 2),
        (streams([103, 102, 103], [100, 100, 100], 2.05, 0.8), ["holds-with-limits"] * 2),
        (streams([100.5, 100, 99], [100, 100, 100], 3.0, 0.02), ["refuted", "refuted"]),
        (streams([90, 90, 90], [100, 100, 100], 2.0, 1.5), ["refuted", "refuted"]),
    ],
)
def test_streaming(rows: list[dict], outcomes: list[str]) -> None:
    found = streaming.judge(rows)
    assert [each.claim for each in found] == ["batch-no-stream", "stream-perceived"]
    assert [each.outcome for each in found] == outcomes
    assert all(each.rule and each.reason and each.says for each in found)


@pytest.mark.parametrize(
    ("shares", "outcome"),
    [((1.0, 0.97, 0.96, 1.02, 0.95), "holds"), ((1.0, 1.0, 1.0, 1.0, 0.9), "holds-with-limits"),
     ((1.0, 0.84, 1.0, 1.0, 1.0), "refuted")],
)  # fmt: skip
def test_schedule_options(shares: tuple[float, ...], outcome: str) -> None:
    rows = [{"variant": "nothing", "output_tokens_per_s": 100.0}]
    rows += [{"variant": n, "output_tokens_per_s": 100.0 * s} for n, s in zip(schedule_price.ON, shares, strict=True)]
    (found,) = schedule_price.judge(rows)
    assert found.outcome == outcome and found.rule and found.reason and found.says


@pytest.mark.parametrize(
    ("rows", "outcomes"),
    [
        (determinism.example_rows(tokens=1, bits=1), ["refuted", "holds"]),
        (determinism.example_rows(tokens=1, bits=2), ["holds-with-limits", "holds-with-limits"]),
        (determinism.example_rows(tokens=2, bits=2), ["holds", "holds-with-limits"]),
        (determinism.example_rows(tokens=2, bits=2, mended=False), ["holds", "refuted"]),
        (determinism.example_rows(tokens=1, bits=2, same=2), ["holds-with-limits", "holds-with-limits"]),
    ],
)
def test_greedy_answers(rows: list[dict], outcomes: list[str]) -> None:
    found = determinism.judge(rows)
    assert [each.claim for each in found] == ["greedy-not-deterministic", "exact-cache"]
    assert [each.outcome for each in found] == outcomes


def test_the_same_distribution_is_the_engines_own_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict's figure is the sum that the engine's rule gives; a wrong rule in its place is seen."""
    assert speculation.off_by("engine") < 1e-12
    assert speculation.off_by("ignores the draft") > 0.1 and speculation.off_by("one off") > 0.1
    row = {"speed_up_alone": 2.5, "predicted_speed_up": 2.5, "same_tokens_share": 1.0, "chance": 0.7,
           "num_speculative_tokens": 3, "loses_from": 4}  # fmt: skip
    rows = [{"variant": name, **row} for name in ("draft of 2", "draft of 3", "draft of 3, sampled")]
    assert speculation.faster(rows).outcome == "holds"
    monkeypatch.setitem(speculation.RULES, "engine", speculation.ignores_draft)
    speculation.off_by.cache_clear()
    try:
        assert speculation.faster(rows).outcome == "refuted"
    finally:
        speculation.off_by.cache_clear()


@pytest.mark.parametrize(
    ("computed", "wait", "outcome"),
    [(40, 0.3, "holds"), (40, 0.7, "holds-with-limits"), (70, 0.3, "holds-with-limits"), (40, 0.9, "refuted"),
     (90, 0.3, "refuted")],
)  # fmt: skip
def test_rounds_of_an_agent(computed: float, wait: float, outcome: str) -> None:
    times = {"later_cold_ttft_s": 0.1}
    rows = [
        {"variant": "kept", "computed_tokens_per_question": computed, "later_ttft_s": wait * 0.1, **times},
        {"variant": "computed", "computed_tokens_per_question": 100, "later_ttft_s": 0.1, **times},
    ]
    (found,) = agent.judge(rows)
    assert found.outcome == outcome and found.rule and found.reason and found.says


def budgets(right: dict[str, float], of_a_kind: float, tokens: dict[str, float]) -> list[dict]:
    return [
        {"variant": name, "right": share, "questions": 100, "output_tokens_per_question": tokens[name],
         "seconds_per_question": 1.0, "right_by_kind": {"talk": 1.0, "worked_out": 0.2 + (name == "64") * of_a_kind}}
        for name, share in right.items()
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("right", "of_a_kind", "most", "outcomes"),
    [
        ((0.8, 0.8, 0.86, 0.85), 0.5, 60, ["holds", "holds"]),
        ((0.8, 0.7, 0.81, 0.8), 0.3, 70, ["holds-with-limits", "holds-with-limits"]),
        ((0.8, 0.7, 0.81, 0.8), 0.1, 90, ["refuted", "refuted"]),
        ((0.8, 0.7, 0.77, 0.7), 0.5, 60, ["refuted", "holds"]),
    ],
)
def test_budgets_of_thoughts(right: tuple[float, ...], of_a_kind: float, most: float, outcomes: list[str]) -> None:
    shares = {str(budget): share for budget, share in zip(thinking.BUDGETS, right, strict=True)}
    found = thinking.judge(budgets(shares, of_a_kind, {"0": 30, "16": 45, "64": 60, "256": most}))
    assert [each.claim for each in found] == ["thinking-accuracy", "thinking-budget-cost"]
    assert [each.outcome for each in found] == outcomes
    assert all(each.rule and each.reason and each.says for each in found)
