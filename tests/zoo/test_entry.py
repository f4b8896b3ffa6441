"""Entries are read strictly: each mistake is one line that says where it is and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.zoo import made
from workbench.errors import WorkbenchError
from workbench.zoo.entry import count_lines, own_figures
from workbench.zoo.figures import FIGURES, KINDS
from workbench.zoo.folder import load_zoo, select_entries
from workbench.zoo.question import BASELINE, QUICK, SETTINGS, TECHNIQUE, experiment_of


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
    ("changes", "message"),
    [
        ({"kind": "samplng"}, "kind: Input should be"),
        ({"kind": "samplng"}, "did you mean 'sampling'?"),
        ({"rule": '"loop_rate <= 1"'}, "there is no figure 'loop_rate'; did you mean 'loop_ratio'?"),
        ({"rule": '"kl <= 1"'}, "there is no figure 'kl'"),
        ({"technik": "Other"}, "technik: unknown key; did you mean 'technique'?"),
        ({"claim": ""}, "claim: Field required"),
        ({"claim": '"one\\n\\ntwo"'}, "claim: must be one line"),
        ({"use": "{}"}, "use: Dictionary should have at least 1 item"),
        ({"use": "{sampling.topp: 1}"}, "zoo/hotter.yaml: use: sampling.topp: unknown key; did you mean 'top_p'?"),
        ({"baseline": "{sampling.top_p: 2}"}, "zoo/hotter.yaml: baseline: sampling.top_p: "),
        ({"workload": "{promts: 1}"}, "zoo/hotter.yaml: workload.promts: unknown key; did you mean 'prompts'?"),
    ],
)
def test_mistakes(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(WorkbenchError) as refused:
        load_zoo(made.folder(tmp_path, **changes))
    assert message in str(refused.value) and "zoo/hotter.yaml" in str(refused.value) and "\n" not in str(refused.value)


def test_files_that_are_missing_or_wrong(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="no entries there"):
        load_zoo(tmp_path)
    zoo = made.folder(tmp_path)
    with pytest.raises(WorkbenchError, match=r"no entry 'hoter'; did you mean 'hotter'\?"):
        select_entries(load_zoo(zoo), ["hoter"])
    (zoo / "hotter.py").write_text("def f(:\n")
    with pytest.raises(WorkbenchError, match=r"zoo/hotter.py: is no Python source"):
        load_zoo(zoo)
    (zoo / "hotter.py").unlink()
    with pytest.raises(WorkbenchError, match=r"zoo/hotter.yaml: there is no hotter.py beside it"):
        load_zoo(zoo)
    (zoo / "hotter.yaml").write_text("- 1\n")
    with pytest.raises(WorkbenchError, match=r"zoo/hotter.yaml: must be a mapping"):
        load_zoo(zoo)


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
    with pytest.raises(WorkbenchError, match="zoo/a.py: figures must take no arguments and return a dict"):
        own_figures(file)


def test_figures_that_take_arguments_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('def figures(runner):\n    return {"a": 1}\n')
    with pytest.raises(WorkbenchError, match="must take no arguments"):
        own_figures(file)


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
