"""One page, whole in itself, in which no text from a run is more than words."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.helpers.command_line import answer, refused
from tests.measure.runs import vouched
from tests.runs.small_folders import HOSTILE, comparison_folder, experiment, run_folder, sweep_folder
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.experiment.verdict import RuleChange
from workbench.figures.figure import Figure
from workbench.reports import variants_table as comparison_text
from workbench.reports.latency_check import check_latencies, find_repetitions
from workbench.reports.report import render_report, write_report
from workbench.reports.run_report import changed_settings
from workbench.reports.self_contained import external_resources, markup_errors
from workbench.runs.metrics import percentile
from workbench.svg import format_tick
from workbench.trace.events import Decoded, Finished, Stepped, Submitted
from workbench.trace.recorder import Recorder


def hostile_recorder() -> Recorder:
    recorder = Recorder()
    for index, name in enumerate(("a", HOSTILE, "c")):
        recorder.record(Submitted(1.0 + index, name, prompt_tokens=2, arrival=0.9 + index))
        recorder.record(Decoded(1.5 + index, name, HOSTILE, step=index, token_id=1))
        recorder.record(Stepped(1.6 + index, step=index, phase="decode", wall_seconds=0.4, requests=1))
        error = HOSTILE if index == 2 else ""
        recorder.record(Finished(2.0 + index, name, reason="error" if error else "stop", token_ids=(1,), error=error))
    return recorder


def pages(parent: Path) -> list[str]:
    hostile_svg = '<svg xmlns="http://www.w3.org/2000/svg"><script href="https://evil.example"/></svg>'
    folders = [
        run_folder(parent, experiment(HOSTILE.replace("\x00", "")), hostile_recorder()).path,
        comparison_folder(parent, words="<script>alert(3)</script>", svg=hostile_svg).path,
        sweep_folder(parent),
    ]
    return [render_report(folder) for folder in folders]


def test_a_report_loads_nothing_and_everything_is_closed(tmp_path: Path) -> None:
    for page in pages(tmp_path):
        assert external_resources(page) == [] and markup_errors(page) == []
        assert "<script" not in page and "<img src=x" not in page and "onerror=alert(2)>" not in page


@pytest.mark.parametrize(
    "planted",
    [
        '<script src="https://cdn.example/plot.js"></script>',
        "<script>1</script>",
        '<link rel="stylesheet" href="//fonts.example/a.css">',
        '<img src="https://cdn.example/a.png">',
        '<img src="data:image/png;base64,AAAA" srcset="a.png 2x">',
        "<style>@import 'https://cdn.example/a.css';</style>",
        "<style>p { background: url(https://cdn.example/a.png) }</style>",
        '<p style="background: url(a.png)">x</p>',
        '<svg><image href="http://cdn.example/a.png"/></svg>',
        '<svg><use xlink:href="a.svg#b"/></svg>',
        '<svg><rect fill="url(https://cdn.example/p.svg#a)"/></svg>',
        '<a href="https://cdn.example">x</a>',
        '<iframe srcdoc="x"></iframe>',
        '<meta http-equiv="refresh" content="0; url=https://cdn.example">',
        "<p onclick=\"fetch('x')\">x</p>",
        '<base href="https://cdn.example/">',
    ],
)
def test_what_is_planted_is_found(tmp_path: Path, planted: str) -> None:
    page = render_report(run_folder(tmp_path).path)
    assert external_resources(page) == []
    assert len(external_resources(page.replace("</body>", planted + "</body>"))) >= 1


def test_what_is_left_open_or_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = render_report(run_folder(tmp_path).path)
    assert markup_errors(page) == []
    for planted in ("<div>", "</div>", "<b><i>x</b></i>", '<a href="#nowhere">x</a>', '<p id="top">x</p>'):
        assert markup_errors(page.replace("</body>", planted + "</body>")), planted


def test_a_page_that_would_load_something_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = run_folder(tmp_path)
    drawn = '<svg><image href="https://cdn.example/a.png"/></svg>'
    monkeypatch.setattr(Figure, "svg", lambda *_, **__: drawn)
    with pytest.raises(AssertionError, match="would load image href=https://cdn.example"):
        write_report(record.path, tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


@settings(max_examples=tries(8))
@given(st.text(max_size=60))
def test_any_question_is_words(tmp_path_factory: pytest.TempPathFactory, question: str) -> None:
    record = comparison_folder(tmp_path_factory.mktemp("runs"), words=question or "?")
    page = render_report(record.path)
    assert external_resources(page) == [] and markup_errors(page) == []
    path = write_report(record.path)
    assert path.parent == record.path.parent.resolve() and path.read_bytes()
    record.verify()


def test_a_run_says_all_that_is_asked_of_it(tmp_path: Path) -> None:
    asked = experiment("How fast?", schedule={"max_num_seqs": 3}, sampling={"temperature": 0})
    roof = {"predicted_s": 0.5, "measured_s": 1.0, "share_of_roofline": 0.5, "share_of_read_ceiling": 0.4,
            "share_of_gemm_ceiling": 0.3}  # fmt: skip
    ceilings = {"working_set_bytes": 1e6, "read_level": "L2", "read_ceiling_bytes_per_s": 1e9, "gemm_dtype": "float32",
                "gemm_ceiling_flops_per_s": 1e9, "decode": roof}  # fmt: skip
    record = run_folder(tmp_path, asked, roofline=ceilings, others_cpu_share=0.42)
    page = render_report(record.path)
    for words in ("How fast?", "schedule.max_num_seqs", "max_num_seqs: 3", "TTFT", "KV cache", "processor", "packages",
                  "decode: 0.5 s is the lower bound", "No rule was written", "load before", "42% of the processor",
                  f"workbench reproduce {record.name}", "prefers-color-scheme: dark", "@media print"):  # fmt: skip
        assert words in page, words
    assert page.index("schedule.max_num_seqs") < page.index("max_num_seqs: 3"), "what differs stands first"
    assert page.count('class="marks"') == 4 and str(tmp_path) not in page
    assert "do not trust these timings" in page


def test_settings_that_differ_from_the_defaults(tmp_path: Path) -> None:
    asked = experiment(cache={"prefix": {"kind": "radix", "ttl": 5}, "format": "int8"}, workload={"kind": "random"})
    found = dict(changed_settings(asked.to_yaml()))
    assert found == {
        "model.name": "shape:tiny", "backend": "eager", "cache.prefix.kind": "radix", "cache.prefix.ttl": "5.0",
        "cache.format": "int8", "workload.kind": "random",
    }  # fmt: skip
    assert changed_settings("question: x\nno_such: 1\n") == ()


@pytest.mark.parametrize("outcome", ["holds", "holds-with-limits", "refuted", "not-testable-here"])
def test_a_verdict_with_its_rule_and_numbers(tmp_path: Path, outcome: str) -> None:
    record = comparison_folder(tmp_path, outcome)
    page = render_report(record.path)
    assert f'<div class="verdict {outcome}">' in page and escape("a < b") in page and escape("0.01 < 0.02") in page
    assert "speed up 2" in page and "data:image/svg+xml;base64," in page


def test_a_rule_that_was_changed_after_a_look_says_so_in_the_report_and_in_the_terminal(tmp_path: Path) -> None:
    change = RuleChange("the <bar>", "2026-11-22", "run-1.json", "it was & is high")
    record = comparison_folder(tmp_path, changed=[change])
    page = render_report(record.path)
    assert "rule changed" in page
    assert all(escape(words) in page for words in vars(change).values()) and "<bar>" not in page
    console = Console(record=True, width=200)
    comparison_text.show(record, console)
    assert f"changed {change}" in console.export_text()
    (tmp_path / "old").mkdir()
    assert "rule changed" not in render_report(comparison_folder(tmp_path / "old").path)


def test_a_sweep_has_every_point_as_a_row_and_a_section(tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path)
    page = render_report(folder)
    assert "4 points (2 done, 1 failed, 1 not run)" in page and "Which size?" in page
    for point in range(1, 5):
        assert page.count(f'href="#point-{point}"') == 1 and page.count(f'id="point-{point}"') == 1
    assert page.count("no memory &lt;/title&gt;") == 2, "in the table and in its section"
    assert "throughput, tokens/s over schedule.max_num_seqs" in page and "workbench sweep experiment.yaml" in page
    damaged = next(folder.glob("points/*1/run-*/summary.json"))
    damaged.write_text("{}")
    assert "summary.json has 2 bytes" in render_report(folder), "a damaged run is a point that failed"


@pytest.mark.parametrize("path", ["seed", "workload.seed"])
def test_points_that_differ_in_a_seed_alone_repeat_each_other(path: str, tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path)
    for seed, file in enumerate(sorted(folder.glob("points/*/point.json"))):
        point = json.loads(file.read_text())
        file.write_text(json.dumps({**point, "settings": {**point["settings"], path: seed}}))
    page = render_report(folder)
    assert "throughput, tokens/s over schedule.max_num_seqs" in page and f"over {path}" not in page


def test_the_command_line(tmp_path: Path) -> None:
    record = run_folder(tmp_path)
    found = answer("report", record.path, "--out", tmp_path / "new" / "a.html")
    assert Path(found["report"]).stat().st_size == found["bytes"]
    assert "no such folder" in refused("report", tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    refused("report", record.path, "--out", tmp_path / "file" / "a.html")
    with pytest.raises(WorkbenchError, match="cannot be written"):
        write_report(record.path, tmp_path / "file" / "a.html")


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "0"), (0.25, "0.25"), (1500, "1500"), (25_000, "25k"), (3e6, "3M"), (2.5e9, "2.5G")]
)
def test_numbers_of_ticks(value: float, expected: str) -> None:
    assert format_tick(value) == expected


def test_repetitions_are_of_the_same_experiment_and_hardware_and_no_replays(tmp_path: Path) -> None:
    uneven = Recorder()
    uneven.record(Submitted(1.0, "a", prompt_tokens=2))
    for index, time in enumerate((1.5, 2.0, 3.5, 7.0)):
        uneven.record(Decoded(time, "a", "x", step=index, token_id=1, index=index))
    uneven.record(Finished(7.0, "a", reason="length", token_ids=(1,) * 4))
    first, twin, moved = (run_folder(tmp_path, recorder=uneven) for _ in range(3))
    replayed = run_folder(tmp_path, recorder=uneven, replayed_steps=3)
    run_folder(tmp_path, experiment("Another?"))
    environment = moved.environment | {"cpu": {"model": "i486"}}
    (moved.path / "environment.json").write_text(json.dumps(environment))
    vouched(moved.path)
    assert [each.path for each in find_repetitions(first)] == [twin.path]
    assert find_repetitions(first, twin) == []
    by_name = {each.name: each for each in check_latencies(first, replayed)}
    assert by_name.keys() == {"TPOT", "ITL"} and by_name["ITL"].spread_source == "2 recorded repetitions"
    alone = next(each for each in check_latencies(first, twin) if each.name == "ITL")
    assert (alone.low, alone.high) == (percentile((0.5, 1.5, 3.5), 10), percentile((0.5, 1.5, 3.5), 90))
