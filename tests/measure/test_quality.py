"""A quality run as small as one can be: its table, its folder, its verdict, and what the command line makes of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.measure.small import QUALITY, asked, is_drawn
from workbench.cli import main
from workbench.cli.quality import parse_variant
from workbench.errors import WorkbenchError
from workbench.experiment.verdict import Verdict
from workbench.measure.compare_variants import measure_variants
from workbench.measure.quality import quality as quality_module
from workbench.measure.run import run
from workbench.reports import variants_table as comparison_text
from workbench.reports.reproduce import reproduce
from workbench.runs.record import Record


def judge(rows) -> list[Verdict]:
    return [Verdict("small", "it is small", "at most 1", "holds" if rows[1]["kl_mean"] < 1 else "refuted", "measured")]


def code(lines: int) -> str:
    """Python that says a new thing in every line, in paragraphs of 5 lines."""
    draw = random.Random(1)
    words = ("value", "count", "index", "name", "node", "total")
    made = (
        f"{draw.choice(words)}_{n} = {draw.choice(words)}[{draw.randrange(99)}] + {n}" + "\n" * (n % 5 == 4)
        for n in range(lines)
    )
    return "\n".join(made) + "\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "mine.py"
    path.write_text(code(400))
    return path


@pytest.fixture(scope="module")
def record(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Record:
    experiment = asked(QUALITY, f"workload.texts=[{text}]")
    return run(experiment, tmp_path_factory.mktemp("quality"), "small", progress=False)


def row(record: Record, name: str) -> dict[str, Any]:
    return next(each for each in record.summary["rows"] if each["variant"] == name)


def test_the_reference_is_no_distance_from_itself(record: Record) -> None:
    exact = row(record, "float32")
    assert exact["kl_max"] == 0 and exact["same_top"] == exact["greedy_equal"] == 1.0
    assert exact["first_divergence"] == 8


def test_variants_are_some_distance_away(record: Record) -> None:
    exact, half, window, packed = (row(record, name) for name in ("float32", "bfloat16", "window", "int8"))
    assert 0 < half["kl_mean"] < 1e-2 and half["kl_mean"] <= half["kl_max"]
    assert 0 < packed["kl_mean"] < window["kl_mean"]
    assert abs(half["bits_per_byte"] - exact["bits_per_byte"]) < 0.05
    assert 0.2 < exact["bits_per_byte"] < 3


def test_bytes_are_what_is_stored(record: Record) -> None:
    """Draft: 3 layers, 2 groups of 32."""
    per_token = 2 * 3 * 2 * 32
    assert row(record, "float32")["stored_bytes_per_token"] == 4 * per_token
    assert row(record, "bfloat16")["stored_bytes_per_token"] == 2 * per_token
    assert row(record, "int8")["stored_bytes_per_token"] == (1 + 4 / 32) * per_token
    pages = 1024 // 64
    assert row(record, "float32")["kv_bytes"] == pages * 64 * 4 * per_token
    assert row(record, "window")["kv_bytes"] == 2 * 64 * 4 * per_token


def test_sequences_that_fit(record: Record) -> None:
    for each in record.summary["rows"]:
        assert each["sequences_predicted"] <= each["sequences"]
        assert each["pool_bytes"] <= 2**22
    exact, half = row(record, "float32"), row(record, "bfloat16")
    assert exact["sequences"] == (2**22 - 64 * 1536) // (5 * 64 * 1536)
    assert half["sequences"] >= 2 * exact["sequences"]


def test_the_tables_hold_what_the_rows_are_means_of(record: Record) -> None:
    places = [each for each in record.read_table("places.parquet").to_pylist() if each["variant"] == "int8"]
    found = row(record, "int8")
    assert len(places) == found["scored_tokens"] == row(record, "float32")["scored_tokens"]
    assert sum(each["kl"] for each in places) / len(places) == pytest.approx(found["kl_mean"])
    assert {each["depth"] for each in record.read_table("copying.parquet").to_pylist()} == {0.0, 1.0}
    speed = record.read_table("speed.parquet").to_pylist()
    assert len(speed) == 4 * 2 and all(len(each["step_s"]) == 4 for each in speed)
    assert set(found["decode_tokens_per_s"]) == {"16", "40"}


def test_differences_are_of_the_rows_and_lie_in_their_intervals(record: Record) -> None:
    exact = row(record, "float32")
    assert "difference" not in exact and 0 < exact["choices"] <= 10 and exact["needle_questions"] == 6
    for name in ("bfloat16", "window", "int8"):
        found = row(record, name)
        assert found["difference"]["kl_mean"]["mean"] == pytest.approx(found["kl_mean"])
        for figure, value in (("bits_per_byte", found), ("choices_right", found)):
            assert found["difference"][figure]["mean"] == pytest.approx(value[figure] - exact[figure], abs=1e-9)
        more = found["needles_right"] - exact["needles_right"]
        assert found["difference"]["needles_right"]["mean"] == pytest.approx(more)


def test_the_verdict_and_the_picture_lie_in_the_folder(record: Record) -> None:
    record.verify()
    assert record.summary["verdicts"][0]["outcome"] == "holds"
    assert is_drawn(record)


KEYS = ("bits_per_byte", "kl_mean", "kl_p99", "kl_max", "same_top", "first_divergence", "copied", "copy_gain")
INT8_ALONE = (
    "judge=null",
    "workload.speed=null",
    "workload.pool=null",
    "variants={int8: {cache.format: int8, cache.quant_group: 32, cache.residual_length: 32}}",
)


def test_the_same_experiment_gives_the_same_quality(record: Record, text: Path) -> None:
    again = measure_variants(asked(QUALITY, *INT8_ALONE, f"workload.texts=[{text}]")).rows[1]
    keys = (*KEYS, "choices_right", "needles_right", "needles", "difference")
    assert {key: again[key] for key in keys} == {key: row(record, "int8")[key] for key in keys}


def test_logits_held_for_one_text_at_a_time_change_nothing(
    record: Record, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality_module, "MAX_REFERENCE_BYTES", 1)
    apart = measure_variants(asked(QUALITY, *INT8_ALONE, f"workload.texts=[{text}]"))
    for key in (*KEYS, "choices_right"):
        assert apart.rows[1][key] == pytest.approx(row(record, "int8")[key], rel=1e-3, abs=1e-6)
    places = [each for each in record.read_table("places.parquet").to_pylist() if each["variant"] == "int8"]
    mine = [each for each in apart.tables["places"] if each["variant"] == "int8"]
    assert [(each["text"], each["token"]) for each in mine] == [(each["text"], each["token"]) for each in places]


def test_tables_hold_every_row(record: Record) -> None:
    rows = record.summary["rows"]
    text = "\n".join(table.markdown() for table in comparison_text.variant_tables(rows))
    assert text.count("\n| float32 |") == 3 and "KL mean" in text and "decode at 40" in text


def test_inspect_shows_it_and_reproduce_says_why_not(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(record.path)]) == 0
    out = capsys.readouterr().out
    assert "what does it cost?" in out and "small: holds" in out and "bfloat16" in out
    with pytest.raises(WorkbenchError, match="a table of variants, not one run of requests"):
        reproduce(record)


def test_a_text_of_ones_own_on_the_command_line(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quality", "half: model.dtype=bfloat16", "--model", "demo-draft", "--text", str(text), "--json"]
    small = ("windows=1", "copying=null", "greedy_prompts=1", "decode=4", "speed=null", "pool=null")
    words += [*(f"--set=workload.{setting}" for setting in small), "--out", str(tmp_path / "runs")]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["variant"] for each in found["rows"]] == ["float32", "half"]
    assert found["about"]["texts"] == "files" and Path(found["run"]).is_dir()


@pytest.mark.parametrize(
    ("words", "name", "changes"),
    [
        ("cache.format=int8", "cache.format=int8", {"cache.format": "int8"}),
        ("a b: x.y=1 z=true", "a b", {"x.y": 1, "z": True}),
        ('w: attention.pattern="[window, full]"', "w", {"attention.pattern": ["window", "full"]}),
    ],
)
def test_variants_on_the_command_line(words: str, name: str, changes: dict) -> None:
    assert parse_variant(words) == (name, changes)


def test_windows_may_be_shorter_than_the_models_context(text: Path, tmp_path: Path) -> None:
    nothing = (
        "workload.copying=null",
        "workload.needles=null",
        "workload.speed=null",
        "workload.pool=null",
        "variants={}",
        "judge=null",
    )
    few = "workload.windows=3", "workload.context=64", f"workload.texts=[{text}]"
    found = measure_variants(asked(QUALITY, *nothing, *few))
    assert [each["variant"] for each in found.rows] == ["float32", "as given"]  # without variants, itself
    assert found.metadata["context"] == 64 and all(each["scored_tokens"] <= 3 * 64 for each in found.rows)
