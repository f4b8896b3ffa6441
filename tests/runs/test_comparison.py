"""Runs against a baseline: what is compared with what, how it is named, and what is refused."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.command_line import cli, refused
from tests.helpers.refusals import refuses
from tests.runs.folders import RECORDS, environment, many, run_of_rounds, write
from workbench.reports.comparison_charts import BETTER, front_figure
from workbench.runs import compare
from workbench.runs.compared_run import ComparedRun, label_runs
from workbench.runs.comparison import Comparison, ComparisonRow, RepeatedRuns, _cells, _verdict
from workbench.runs.measures import depends_on_time, direction, parse_objective

DENSE = [1.0, 1.2, 1.1, 1.3, 1.0, 1.4]
TWICE = [2 * value for value in DENSE]
PRECISION = str(RECORDS / "kv_precision-20261121-135638.json")


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(run_of_rounds(tmp_path, "turns", {"dense": DENSE, "int8": TWICE, "again": DENSE}))


def row_of(found: Comparison, label: str, measure: str):
    [row] = [row for row in found.rows if (row.label, row.measure) == (label, measure)]
    return row


def test_rounds_of_one_run_are_paired(run: str) -> None:
    found = compare([run], f"{run}:dense", ["ttft_s.p50"])
    row = row_of(found, "cache.format=int8", "ttft_s_p50")
    assert (row.ratio, row.ratio_low, row.ratio_high) == pytest.approx((2, 2, 2))  # though rounds differ by 40%
    assert row.paired and row.repetitions == row.baseline_repetitions == 6
    assert row.verdict == "worse" and row.confidence == 0.95
    assert row.value == pytest.approx(2.3) and row.baseline == pytest.approx(1.15)
    same = row_of(found, "cache.format=int4", "ttft_s_p50")
    assert same.verdict == "same" and same.ratio == 1


def test_a_row_shows_each_of_its_numbers() -> None:
    row = ComparisonRow("ttft_s", "b", 1.5, 2.5, -1.0, -1.25, -0.75, 0.6, 0.5, 0.7, 0.9, 3, 2, False, "better")
    shown = ["ttft_s", "b", "1.5", "-1 [-1.25, -0.75]", "0.600 [0.500, 0.700]", "90%, better", "3, 2"]
    assert _cells(row) == shown
    assert _cells(replace(row, baseline_repetitions=3, paired=True))[-1] == "3, in turn"


def test_exchanging_the_baseline_inverts(run: str) -> None:
    there = compare([f"{run}:int8"], f"{run}:dense").rows
    back = compare([f"{run}:dense"], f"{run}:int8").rows
    assert [row.measure for row in there] == [row.measure for row in back]
    for one, other in zip(there, back, strict=True):
        assert one.ratio is not None and other.ratio is not None and one.ratio * other.ratio == pytest.approx(1)
        assert one.difference == pytest.approx(-other.difference)
        turned = {"better": "worse", "worse": "better"}
        assert other.verdict == turned.get(one.verdict or "", one.verdict)


def test_runs_that_differ_in_seeds_repeat_each_other(tmp_path: Path) -> None:
    for seed in range(5):
        scale = 1 + seed / 10
        run_of_rounds(tmp_path, "r", {"dense": [scale * v for v in DENSE], "int8": [3 * scale * v for v in DENSE]},
                      seed=seed)  # fmt: skip
    first = str(sorted(tmp_path.iterdir())[0])
    row = row_of(compare([str(tmp_path)], f"{first}:dense"), "cache.format=int8", "ttft_s_p50")
    assert row.repetitions == 5 and row.paired and row.ratio == pytest.approx(3) and row.confidence == 1 - 2**-4
    apart = compare([str(tmp_path)], f"{first}:dense", separate=True)
    assert len(apart.groups) == 10 and len({group.label for group in apart.groups}) == 10


def test_a_run_against_itself_needs_to_be_asked_for(run: str) -> None:
    refuses("nothing to compare with", compare, [f"{run}:dense"], f"{run}:dense")


def test_times_of_a_busy_machine_are_refused_unless_forced(tmp_path: Path) -> None:
    run = str(run_of_rounds(tmp_path, "busy", {"dense": DENSE, "int8": TWICE}, busy=0.3))
    refuses("other processes took more than 10% .* ttft_s_p50 .* --force", compare, [run], f"{run}:dense")
    assert compare([run], f"{run}:dense", ["kv_bytes_peak"]).rows  # which no other process changes
    forced = compare([run], f"{run}:dense", force=True)
    assert forced.noisy_runs == (Path(run).name,) and forced.rows


def test_what_is_not_whole_is_refused_with_the_reason(run: str, tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "INCOMPLETE").write_text("")
    refuses("killed: unfinished", compare, [str(tmp_path / "killed")], f"{run}:dense")
    (Path(run) / "steps.parquet").unlink()
    refuses("steps.parquet is missing", compare, [run], f"{run}:dense")


@pytest.mark.parametrize(
    ("asked", "baseline", "measure", "message"),
    [
        ("RUN", "RUN", [], "must be one run or variant, and this is 3: 'dense', 'int8', 'again'"),
        ("RUN", "RUN:fp4", [], "no variant 'fp4' there; it has 'dense'"),
        ("nowhere", "RUN:dense", [], "no such run"),
        ("RUN", "RUN:dense", ["ttft_p50"], "measure ttft_p50: the baseline has none; did you mean 'ttft_s_p50'"),
    ],
)
def test_mistakes_are_reported(run: str, asked: str, baseline: str, measure: list[str], message: str) -> None:
    refuses(re.escape(message), compare, [asked.replace("RUN", run)], baseline.replace("RUN", run), measure)


def test_labels_are_the_settings_that_differ() -> None:
    found = compare([PRECISION], f"{PRECISION}:float32", ["bits_per_byte"])
    assert [row.label for row in found.rows] == [
        "bfloat16", "cache.format=int8", "cache.format=fp8", "cache.format=int4",
        "cache.format=int4 cache.rotate=true", "cache.keys=int8 cache.values=int4",
    ]  # fmt: skip


def item(name: str, settings: dict, variant: str | None = None, **around: str) -> ComparedRun:
    return ComparedRun(name, variant, settings, around, {}, None, name)


def test_runs_with_equal_settings_are_distinguished_by_their_environment() -> None:
    same = {"backend": "eager"}
    assert label_runs([item("a", same, commit="1"), item("b", same, commit="2")]) == ["commit=1", "commit=2"]
    assert label_runs([item("a", same), item("b", same)]) == ["a", "b"]
    assert label_runs([item("a", same), item("b", {})]) == ["a", "b"]  # an older record that lacks a setting
    assert label_runs([item("a", {"x": 1, "y": 2}), item("b", {"x": 1, "y": 3})]) == ["y=2", "y=3"]
    for empty in (None, False, [], {}):  # what the first run does without is not said of it
        assert label_runs([item("a", {"x": empty}), item("b", {"x": 1})]) == ["a", "x=1"]


@pytest.mark.parametrize(
    ("low", "high", "confidence", "less", "more"),
    [
        (0.1, 0.2, 0.9, "worse", "better"), (-0.2, -0.1, 0.9, "better", "worse"), (0.1, 0.2, 0.89, None, None),
        (0.0, 0.2, 0.95, None, None), (-0.2, 0.0, 0.95, None, None), (-0.2, 0.2, 0.95, None, None),
        (0.0, 0.0, 0.95, "same", "same"), (0.1, 0.2, None, None, None), (None, None, 0.95, None, None),
    ],
)  # fmt: skip
def test_verdict_needs_an_interval_on_one_side(
    low: float | None, high: float | None, confidence: float | None, less: str | None, more: str | None
) -> None:
    names = ("ttft_s_p50", "output_tokens_per_s", "scored")
    assert [_verdict(name, low, high, confidence) for name in names] == [less, more, None]


settings_of = st.dictionaries(st.sampled_from("abc"), st.sampled_from([1, 2, None, "x"]), max_size=3)


@given(every=st.lists(settings_of, min_size=1, max_size=6))
def test_no_two_labels_are_the_same(every: list[dict]) -> None:
    found = label_runs([item(str(index), settings) for index, settings in enumerate(every)])
    assert len(set(found)) == len(found) and all(found)


points = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=12)


@given(points=points, ways=st.tuples(st.sampled_from(["min", "max"]), st.sampled_from(["min", "max"])))
def test_no_point_beats_the_front_and_every_other_is_beaten(points: list, ways: tuple[str, str]) -> None:
    groups = [
        RepeatedRuns(
            str(index), (ComparedRun(str(index), None, {}, {}, {"x": float(x), "y": float(y)}, None, str(index)),)
        )
        for index, (x, y) in enumerate(points)
    ]
    asked, comparison = (f"x:{ways[0]}", f"y:{ways[1]}"), Comparison("0", tuple(groups), ())
    found = comparison.pareto(*asked)
    signs = [1 if way == "min" else -1 for way in ways]

    def beats(one: tuple, other: tuple) -> bool:
        a, b = ([sign * value for sign, value in zip(signs, point, strict=True)] for point in (one, other))
        return all(p <= q for p, q in zip(a, b, strict=True)) and a != b

    dots = front_figure(comparison, *asked).spec["layer"][1]
    for row, point, dot in zip(found, points, dots["data"]["values"], strict=True):
        assert row["front"] != any(beats(other, point) for other in points)
        assert (dot["x"], dot["y"], dot["front"]) == (*point, row["front"])
    assert dots["encoding"]["y"]["title"].endswith(BETTER[ways[1]])


def test_a_measure_declares_which_way_is_better() -> None:
    names = ("ttft_s_p50", "output_tokens_per_s", "kv_bytes_peak", "same_top", "scored")
    assert [direction(name) for name in names] == ["min", "max", "min", "max", None]
    assert parse_objective("ttft_s.p50") == ("ttft_s_p50", "min") and parse_objective("scored:max") == ("scored", "max")
    refuses("scored:min if less of it is better", parse_objective, "scored")
    timed = [depends_on_time(name) for name in ("output_tokens_per_s", "wall_s", "kv_bytes_peak", "kl_mean")]
    assert timed == [True, True, False, False]


def test_the_commands_print_what_the_values_say(run: str, tmp_path: Path) -> None:
    against = f"compare {run} --baseline {run}:dense"
    ask = f"{against} --measure ttft_s_p50"
    rows = compare([run], f"{run}:dense", ["ttft_s_p50"]).as_dicts()
    assert cli(f"{ask} --format json").json["rows"] == rows
    out = cli(ask).out
    assert "2.000 [2.000, 2.000]" in out and "95%, worse" in out and "6, in turn" in out
    assert "| ttft_s_p50 |" in cli(f"{ask} --format md").out
    cli(f"{ask} --format csv --out", tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text().startswith("measure,label,")
    rows = cli(f"{against} --pareto ttft_s_p50,kv_bytes_peak --format json").json["rows"]
    assert [row["front"] for row in rows] == [True, False, True]
    assert "give its file with --out" in refused(f"{against} --format svg")
    assert cli("runs --columns run --format csv", tmp_path).out == f"run\n{os.path.basename(run)}\n"
    assert cli("runs --columns run --format csv --limit 0", tmp_path).out == "run\n"
    wrong = refused("runs --where 'format = 1'", tmp_path)
    assert wrong.startswith("error: --where: no column 'format'; did you mean 'cache.format'")
    assert "cache.format\n" in cli("runs --names", tmp_path).out


@pytest.mark.parametrize("more", ["", "--pareto ttft_s_p50,output_tokens_per_s"])
@pytest.mark.parametrize("form", ["svg", "png"])
def test_pictures_are_drawn(run: str, tmp_path: Path, more: str, form: str) -> None:
    out = tmp_path / f"x.{form}"
    cli(f"compare {run} --baseline {run}:dense --format {form} {more} --out", out)
    content = out.read_bytes()
    assert content.startswith(b"\x89PNG") if form == "png" else b"cache.format=int8" in content


def test_it_shows_itself_in_a_notebook(run: str) -> None:
    page = compare([run], f"{run}:dense")._repr_html_()
    assert page.count("<tr>") > 3 and "cache.format=int8" in page


def test_runs_without_rounds_have_no_intervals(tmp_path: Path) -> None:
    one, other, _ = (tmp_path / row["run"] for row in many(tmp_path, 3))
    found = compare([str(other)], str(one), force=True, measure=["output_tokens_per_s"])
    [row] = found.rows
    assert row.confidence is None and row.ratio_low is None and row.verdict is None
    assert row.ratio == pytest.approx(row.value / row.baseline)
    text = write(tmp_path / "bare", "question: q\n", {"wall_s": 1.0}, environment())
    refuses("name a measure with --measure", compare, [str(text)], str(one), force=True)
