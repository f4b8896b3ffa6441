"""Entries are read strictly: each mistake is one line that says where it is and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from tests.zoo import made
from workbench.claims.comparison import BASELINE, FIGURES, KINDS, QUICK, SETTINGS, TECHNIQUE
from workbench.claims.technique import count_lines, experiment_of, load_zoo, own_figures


def test_an_entry_as_it_should_be(tmp_path: Path) -> None:
    (entry,) = load_zoo(made.folder(tmp_path)).values()
    assert (entry.name, entry.settings.technique, entry.summary) == ("hotter", "Hotter", "Hotter: multiply the logits.")
    assert entry.lines == made.SOURCE.split('"""\n\n')[1].count("\n")
    experiment = experiment_of(entry)
    assert list(experiment.variants) == [BASELINE, TECHNIQUE] and experiment.workload.kind == "texts"
    assert experiment.variant(TECHNIQUE).sampling.filters[0].arguments == {"times": 0.5}
    assert entry.rule.figures == ("loop_ratio", "bits_per_byte_ratio")


def test_its_own_figures_may_be_in_the_rule(tmp_path: Path) -> None:
    (entry,) = load_zoo(made.folder(tmp_path, rule='"heat >= 1"')).values()
    assert entry.rule.outcome({"heat": 2.0}) == "holds"


def test_the_workload_may_be_another(tmp_path: Path) -> None:
    (entry,) = load_zoo(made.folder(tmp_path, workload="{prompts: 3}")).values()
    workload = experiment_of(entry).workload.model_dump()
    assert workload["prompts"] == 3 and workload["output_tokens"] == SETTINGS["sampling"]["workload"]["output_tokens"]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ('return {"a": 1, "b": 2}', ["a", "b"]),
        ("return dict(a=1, b=2)", ["a", "b"]),
        ('if x:\n        return {"a": 1}\n    return {"a": 2, "c": 0}', ["a", "c"]),
        ("return found", None),
        ("return {name: 1}", None),
        ('return {**found, "a": 1}', None),
        ("return dict(found)", None),
        ("pass", None),
    ],
)
def test_names_of_own_figures_are_written_out(tmp_path: Path, body: str, names: list[str] | None) -> None:
    file = tmp_path / "a.py"
    file.write_text(f"def figures():\n    {body}\n")
    if names is not None:
        assert own_figures(file) == names
        return
    refuses("a.py: figures must take no arguments and return a dict", own_figures, file)


@given(st.text("ab\n", max_size=30), st.integers(0, 3), st.lists(st.sampled_from(["x = 1", "", "# why"]), max_size=8))
def test_lines_are_those_without_the_docstring(doc: str, blank: int, body: list[str]) -> None:
    import tempfile

    text = "\n".join(body).strip("\n")
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "a.py"
        file.write_text(f'"""{doc}"""' + "\n" * (blank + 1) + text + "\n" * blank)
        assert count_lines(file) == (len(text.split("\n")) if text else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_figures_an_experiment_and_a_quick_look(kind: str, tmp_path: Path) -> None:
    name = next(iter(FIGURES[kind]))  # type: ignore[index] (a kind)
    (entry,) = load_zoo(made.folder(tmp_path, kind=kind, use="{backend: eager}", rule=f'"{name} <= 1"')).values()
    assert experiment_of(entry, quick=True) != experiment_of(entry) and QUICK.keys() == SETTINGS.keys() == set(KINDS)
