"""`workbench zoo`: what it prints, and how it ends; and the zoo as a value."""

from __future__ import annotations

from pathlib import Path

import pytest

import workbench
from tests.helpers.command_line import answer, cli
from tests.zoo import made
from tests.zoo.made import summary_of
from workbench.claims import measure
from workbench.claims.summary import Summary, read_summaries, records_file, store_summaries
from workbench.claims.technique import LoadedTechnique, load_zoo
from workbench.experiment.experiment import Experiment

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
    store_summaries(entry.file, [summary_of(entry)])
    return folder


def test_the_table_for_people_pages_and_programs(zoo: Path) -> None:
    out = cli("zoo --folder", zoo).out
    assert "A and B, 2024" in out and "2 entries: 1 holds, 1 not run yet" in out
    (line,) = [line for line in out.splitlines() if "hotter" in line]
    for cell in ("sampling", "Hotter", "1 of 2", "0.5", "holds"):  # 0.5: twice the time is half the speed
        assert cell in line
    assert cli("zoo --format md --folder", zoo).out.startswith("| kind | name | technique |")
    one, other = cli("zoo --kind sampling --format json --folder", zoo).json
    assert (one["verdict"], one["figures"]["time_ratio"], one["laws"]) == ("holds", 2.0, {"tried": 2, "broken": ["b"]})
    assert (other["verdict"], other["lines"], other["figures"]) == ("not run yet", 0, {})
    assert "0 entries: none" in cli("zoo --kind draft --folder", zoo).out


def test_one_entry(zoo: Path) -> None:
    out = cli("zoo show hotter --folder", zoo).out
    for words in ("l'  =  times * l", "arguments: {times: 0.5}}]}", "holds: loop_ratio 1, >= 1", "1 of 2 hold", "heat",
                  "broken law b", "the entry's own", "hotter.py (13 lines)", "texts that end in a loop"):  # fmt: skip
        assert words in out, words
    assert "not run yet: `workbench zoo run top`" in cli("zoo show top --folder", zoo).out
    assert answer("zoo show top --folder", zoo)["use"] == {"sampling.top_k": 4}


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


def test_laws_are_printed_and_end_in_one_where_broken(zoo: Path) -> None:
    out = cli("zoo check hotter top --examples 5 --folder", zoo).out
    assert "6 of 6 laws hold" in out and "it has no laws to check" in out
    source = (zoo / "hotter.py").read_text()
    (zoo / "hotter.py").write_text(source.replace("logits * self.times", "logits.mul_(self.times)"))
    found = answer("zoo check --all --examples 5 --folder", zoo, code=1)
    (part,) = found["hotter"]
    assert [law["law"] for law in part["laws"] if not law["ok"]] == ["leaves its input as it was"]
    assert found["top"] == []


def test_a_run_is_stored_and_a_quick_look_is_not(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(entry: LoadedTechnique, quick: bool, model: str, tell: object) -> Summary:
        figures = {"loop_ratio": 0.5, "bits_per_byte_ratio": None if quick else 0.5}
        return Summary("technique", figures, model, "A CPU", date="2026-11-27", inputs=entry.inputs)

    monkeypatch.setattr(measure, "measure_technique", measured)
    top = load_zoo(zoo)["top"]
    ran = cli("zoo run top --quick --folder", zoo)
    assert "not-testable-here" in ran.out and "nothing is stored" in ran.err and not records_file(top.file).exists()
    assert answer("zoo run top --folder", zoo)["entries"]["top"]["outcome"] == "holds-with-limits"
    assert answer("zoo run top --model other --folder", zoo)["faults"] == {}
    assert [each.model for each in read_summaries(top.file)] == ["", "other"]
    assert "every entry has up-to-date figures" in cli("zoo run --all --missing --folder", zoo).out


@pytest.mark.processes
def test_several_are_measured_in_processes_of_their_own(zoo: Path) -> None:
    """One of them fails in its process; the other is measured all the same."""
    changes = {"kind": "schedule", "rule": '"fairness >= 0.5"'}
    made.folder(zoo.parent, **changes, use="{schedule.policy: fair}")
    (zoo / "top.yaml").write_text((zoo / "hotter.yaml").read_text())
    made.folder(zoo.parent, **changes, use=f'{{schedule.policy: "{zoo}/hotter.py:Hotter"}}')
    (zoo / "hotter.py").write_text(made.SOURCE.replace("from dataclasses", "import missing\nfrom dataclasses"))
    found = answer("zoo run hotter top --quick --folder", zoo, code=1)
    assert list(found["entries"]) == ["top"] and "No module named 'missing'" in found["faults"]["hotter"]
    assert found["entries"]["top"]["outcome"] == "holds"


def test_the_zoo_as_a_value(zoo: Path) -> None:
    found = workbench.open_zoo(zoo)
    assert len(found) == 2 and [item.name for item in found.of_kind("sampling")] == ["hotter", "top"]
    assert "1 not run yet" in found._repr_html_() and "Hotter" in str(found)
    assert "return logits * self.times" in found["hotter"]._repr_html_()
