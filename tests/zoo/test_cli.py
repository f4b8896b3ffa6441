"""`workbench zoo`: what it prints, and how it ends; and the zoo as a value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import workbench
from tests.zoo import made
from tests.zoo.made import record_of
from workbench.cli import main
from workbench.experiment.experiment import Experiment
from workbench.zoo import laws, measure
from workbench.zoo.entry import LoadedEntry
from workbench.zoo.folder import load_zoo
from workbench.zoo.measure import MeasuredEntry
from workbench.zoo.question import experiment_of
from workbench.zoo.record import ZooRecord, record_file

OTHER = '"""Other: leave them.\n\nA and B, 2024:\n\n    l\'  =  l\n"""\n'


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """A zoo of two: `hotter`, with a record, and `top`, which only sets what the engine has."""
    folder = made.folder(tmp_path)
    values = made.YAML.splitlines()
    values[0], values[3] = "technique: Top", "use: {sampling.top_k: 4}"
    (folder / "top.yaml").write_text("\n".join(values))
    (folder / "top.py").write_text(OTHER)
    entry = load_zoo(folder)["hotter"]
    record_of(entry).write(record_file(entry))
    return folder


Output = pytest.CaptureFixture[str]


def test_the_table_for_people_pages_and_programs(zoo: Path, capsys: Output) -> None:
    assert main(["zoo", "--folder", str(zoo)]) == 0
    out = capsys.readouterr().out
    assert "A and B, 2024" in out and "2 entries: 1 holds, 1 not run yet" in out
    (line,) = [line for line in out.splitlines() if "hotter" in line]
    for cell in ("sampling", "Hotter", "1 of 2", "0.5", "holds"):  # 0.5: twice the time is half the speed
        assert cell in line
    assert main(["zoo", "--md", "--folder", str(zoo)]) == 0
    assert capsys.readouterr().out.startswith("| kind | name | technique |")
    assert main(["zoo", "--json", "--kind", "sampling", "--folder", str(zoo)]) == 0
    one, other = json.loads(capsys.readouterr().out)
    assert (one["verdict"], one["figures"]["time_ratio"], one["laws"]) == ("holds", 2.0, {"tried": 2, "broken": ["b"]})
    assert (other["verdict"], other["lines"], other["figures"]) == ("not run yet", 0, {})
    assert main(["zoo", "--kind", "draft", "--folder", str(zoo)]) == 0
    assert "0 entries: none" in capsys.readouterr().out


def test_one_entry(zoo: Path, capsys: Output) -> None:
    assert main(["zoo", "show", "hotter", "--folder", str(zoo)]) == 0
    out = capsys.readouterr().out
    for words in ("l'  =  times * l", "arguments: {times: 0.5}}]}", "holds: loop_ratio 1, >= 1", "1 of 2 hold", "heat",
                  "broken law b", "the entry's own", "hotter.py (13 lines)", "texts that end in a loop"):  # fmt: skip
        assert words in out, words
    assert main(["zoo", "show", "top", "--folder", str(zoo)]) == 0
    assert "not run yet: `workbench zoo run top`" in capsys.readouterr().out
    assert main(["zoo", "show", "top", "--json", "--folder", str(zoo)]) == 0
    assert json.loads(capsys.readouterr().out)["use"] == {"sampling.top_k": 4}


def test_the_command_that_is_shown_sets_what_the_entry_sets() -> None:
    import shlex

    for item in workbench.open_zoo():
        words = shlex.split(item.command)
        assert words[:2] == ["workbench", "run"]
        sets = tuple(word for flag, word in zip(words, words[1:], strict=False) if flag == "--set")
        plain = Experiment.from_file(words[2])
        changed = plain.single(item.changes, "use")
        assert plain.with_(*sets) == changed.model_copy(update={"variants": plain.variants})
        assert changed.single(item.settings.use, "use") == changed, "and with them the technique is on"


def test_laws_are_printed_and_end_in_one_where_broken(zoo: Path, capsys: Output) -> None:
    place = ["--examples", "5", "--folder", str(zoo)]
    assert main(["zoo", "check", "hotter", "top", *place]) == 0
    out = capsys.readouterr().out
    assert "6 of 6 laws hold" in out and "no kit checks it" in out
    source = (zoo / "hotter.py").read_text()
    (zoo / "hotter.py").write_text(source.replace("logits * self.times", "logits.mul_(self.times)"))
    assert main(["zoo", "check", "--all", "--json", *place]) == 1
    found = json.loads(capsys.readouterr().out)
    (part,) = found["hotter"]
    assert [law["law"] for law in part["laws"] if not law["ok"]] == ["leaves its input as it was"]
    assert found["top"] == []


def fake_measurement(monkeypatch: pytest.MonkeyPatch, loops: float) -> None:
    def measured(entry: LoadedEntry, quick: bool, tell: object) -> MeasuredEntry:
        figures: dict[str, float | None] = {"loop_ratio": loops, "bits_per_byte_ratio": None if quick else 0.5}
        return MeasuredEntry(experiment_of(entry, quick), figures, {}, 0.0)

    monkeypatch.setattr(measure, "measure_entry", measured)
    monkeypatch.setattr(laws, "check_entry", lambda entry: ())


def test_a_run_is_recorded_and_a_quick_look_is_not(zoo: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_measurement(monkeypatch, 0.5)
    file = record_file(load_zoo(zoo)["top"])
    assert main(["zoo", "run", "top", "--quick", "--folder", str(zoo)]) == 0
    captured = capsys.readouterr()
    assert "not-testable-here" in captured.out and "nothing is recorded" in captured.err and not file.exists()
    assert main(["zoo", "run", "top", "--folder", str(zoo), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"]["top"]["outcome"] == "holds-with-limits"
    record = ZooRecord.read(file)
    assert record is not None and record.figures["loop_ratio"] == 0.5
    assert main(["zoo", "run", "--all", "--missing", "--folder", str(zoo)]) == 0
    assert "every record is of the entry as it is" in capsys.readouterr().out


@pytest.mark.processes
def test_several_are_measured_in_processes_of_their_own(zoo: Path, capsys: Output) -> None:
    """One of them fails in its process; the other is measured all the same."""
    changes = {"kind": "schedule", "rule": '"fairness >= 0.5"'}
    made.folder(zoo.parent, **changes, use="{schedule.policy: fair}")
    (zoo / "top.yaml").write_text((zoo / "hotter.yaml").read_text())
    made.folder(zoo.parent, **changes, use=f'{{schedule.policy: "{zoo}/hotter.py:Hotter"}}')
    (zoo / "hotter.py").write_text(made.SOURCE.replace("from dataclasses", "import missing\nfrom dataclasses"))
    assert main(["zoo", "run", "hotter", "top", "--quick", "--json", "--folder", str(zoo)]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert list(answer["entries"]) == ["top"] and "No module named 'missing'" in answer["faults"]["hotter"]
    assert answer["entries"]["top"]["outcome"] == "holds"


def test_the_zoo_as_a_value(zoo: Path) -> None:
    found = workbench.open_zoo(zoo)
    assert len(found) == 2 and [item.name for item in found.of_kind("sampling")] == ["hotter", "top"]
    assert "1 not run yet" in found._repr_html_() and "Hotter" in str(found)
    assert "return logits * self.times" in found["hotter"]._repr_html_()
