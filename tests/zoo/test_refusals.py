"""The zoo refuses in one line that says where, what, and what would be right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_line import refused
from tests.zoo import made
from tests.zoo.loaded import part_of
from workbench import open_zoo
from workbench.claims import measure
from workbench.claims.technique import load_zoo, own_figures, select_entries
from workbench.errors import WorkbenchError
from workbench.experiment.rule import FigureRule
from workbench.testing import check_policy

NAMES = ("kl", "copying", "bytes_ratio", "decode_time_ratio")


def said(call: Callable[[], Any]) -> str:
    with pytest.raises(WorkbenchError) as refused:
        call()
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "samplng"}, "kind: Input should be"),
        ({"kind": "samplng"}, "did you mean 'sampling'?"),
        ({"rule": '"loop_rate <= 1"'}, "there is no figure 'loop_rate'; did you mean 'loop_ratio'?"),
        ({"rule": '"kl <= 1"'}, "there is no figure 'kl'"),
        ({"technik": "Other"}, "technik: unknown key; did you mean 'technique'?"),
        ({"says": ""}, "says: Field required"),
        ({"says": '"one\\n\\ntwo"'}, "says: must be one line"),
        ({"use": "{}"}, "use: Dictionary should have at least 1 item"),
        ({"use": "{sampling.topp: 1}"}, "zoo/hotter.yaml: use: sampling.topp: unknown key; did you mean 'top_p'?"),
        ({"baseline": "{sampling.top_p: 2}"}, "zoo/hotter.yaml: baseline: sampling.top_p: "),
        ({"workload": "{promts: 1}"}, "zoo/hotter.yaml: workload.promts: unknown key; did you mean 'prompts'?"),
    ],
)
def test_an_entry_names_its_file_and_key(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    words = said(lambda: load_zoo(made.folder(tmp_path, **changes)))
    assert message in words and "zoo/hotter.yaml" in words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("1", "'1' is no comparison"),
        ("kl <= 1 else kl <= 2 else kl <= 3", "has `else` 2 times"),
        ("kl <= 1 else", "cannot be read"),
        ("else kl <= 1", "cannot be read"),
        ("kl <= bytes_ratio", "'bytes_ratio' is no comparison"),
        ("1 <= 2", "'1' is no comparison"),
        ("kl == 0", "equal floats are chance"),
        ("kl in (1, 2)", "compare by <=, <, >= or >"),
        ("not kl <= 1", "'not kl <= 1' is no comparison"),
        ("kl <= True", "'True' is no comparison"),
        ("kl <= 1e999", "is no comparison"),
        ("kl + 1 <= 2", "'kl + 1' is no comparison"),
        ("kl <= 2 * 3", "'2 * 3' is no comparison"),
        ("open('x') <= 1", "is no comparison"),
        ("(lambda: 1)() <= 1", "is no comparison"),
        ("kl <= 1 if kl else 2", "cannot be read"),
        ("kl <=", "cannot be read"),
        ("kl <= 1; kl <= 2", "cannot be read"),
        ("k1 <= 1", "there is no figure 'k1'; did you mean 'kl'?"),
        ("kl <= 1 or byte_ratio <= 1", "did you mean 'bytes_ratio'?"),
        ("zzz <= 1", "known: kl, copying, bytes_ratio, decode_time_ratio"),
        (" and ".join(["kl <= 1"] * 99), "characters"),
    ],
)
def test_a_rule_is_comparisons_of_figures(text: str, message: str) -> None:
    assert message in said(lambda: FigureRule.parse(text, NAMES))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("dry", {"base": 9.0}), ("xtc", {"threshold": 0.0}), ("top_n_sigma", {"n": 0.0}), ("eta", {"epsilon": 1.0}),
     ("mirostat", {"target": 0.0}), ("top_a", {"a": 2.0}), ("tail_free", {"z": 0.0}),
     ("entropy_temperature", {"highest": 0.0}), ("watermark", {"gamma": 1.0})],
)  # fmt: skip
def test_a_part_names_its_argument(name: str, arguments: dict[str, float]) -> None:
    assert next(iter(arguments)) in said(lambda: part_of(name, **arguments))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("hotter.py", "def f(:\n", "zoo/hotter.py: is no Python source"),
        ("hotter.py", "", "zoo/hotter.yaml: there is no hotter.py beside it"),
        ("hotter.yaml", "- 1\n", "zoo/hotter.yaml: must be a mapping"),
        ("hotter.yaml", "", "no entries there"),
    ],
)
def test_a_file_that_is_missing_or_none_is_named(tmp_path: Path, file: str, text: str, message: str) -> None:
    path = made.folder(tmp_path) / file
    path.write_text(text) if text else path.unlink()
    assert message in said(lambda: load_zoo(path.parent))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('return {"heat": "hot"}', "must return numbers by the names heat"),
        ('return {"heat": True}', "must return numbers by the names heat"),
        ('return {"loop_ratio": 1.0}', "'loop_ratio' is a figure of every sampling technique; rename it"),
        ('return {"heat": 1 / 0}', "figures(): ZeroDivisionError"),
    ],
)
def test_own_figures_are_numbers_by_their_names(tmp_path: Path, body: str, message: str) -> None:
    zoo = made.folder(tmp_path)
    (zoo / "hotter.py").write_text((zoo / "hotter.py").read_text().replace('return {"heat": 2.0}', body))
    words = said(lambda: measure._own(load_zoo(zoo)["hotter"]))
    assert "hotter.py: figures()" in words and message in words


def test_names_and_arguments_that_are_none_are_reported_with_the_right_one(tmp_path: Path) -> None:
    zoo = made.folder(tmp_path)
    assert "no entry 'hoter'; did you mean 'hotter'?" in said(lambda: select_entries(load_zoo(zoo), ["hoter"]))
    assert "did you mean 'hotter'" in said(lambda: open_zoo(zoo)["hotte"])
    (tmp_path / "a.py").write_text('def figures(runner):\n    return {"a": 1}\n')
    assert "must take no arguments" in said(lambda: own_figures(tmp_path / "a.py"))
    shortest = {"path": f"{load_zoo()['sjf'].source_file}:ShortestJob", "arguments": {"predictor": "best"}}
    assert "predictor 'best': give given, limit, prompt" in said(lambda: check_policy(shortest))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run", "give entries or --all"),
        ("run hotter --all", "give entries or --all"),
        ("check hoter", "no entry 'hoter'; did you mean 'hotter'?"),
        ("--kind samping", "kind 'samping': is unknown; did you mean 'sampling'?"),
    ],
)
def test_the_command_line_ends_with_2(tmp_path: Path, words: str, message: str) -> None:
    assert message in refused(f"zoo {words} --folder", made.folder(tmp_path))
