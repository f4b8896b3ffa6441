"""Parts of the user's own are found, built and refused in words."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.refusals import refuses
from workbench.request import CustomPart
from workbench.sampling.samplers import Filter, NamedCombiner, load_filter, load_sampler

PARTS = "tests.sampling.parts:"
LOGITS = torch.tensor([[1.0, 2.0, 4.0]])


def plain(part: CustomPart) -> Filter:
    made = load_filter(part)
    assert not isinstance(made, NamedCombiner)
    return made


def test_a_class_is_built_and_a_function_gets_its_arguments():
    ban = plain(CustomPart(path=PARTS + "Ban", arguments={"token": 2}))
    assert ban(LOGITS, []).tolist() == [[1.0, 2.0, -torch.inf]]
    halve = plain(CustomPart(path=PARTS + "halve", arguments={"by": 4.0}))
    assert halve(LOGITS, []).tolist() == [[0.25, 0.5, 1.0]]
    assert plain(CustomPart(path=PARTS + "halve"))(LOGITS, []).tolist() == [[0.5, 1.0, 2.0]]


def test_each_load_builds_anew():
    part = CustomPart(path=PARTS + "Alternating")
    assert load_sampler(part) is not load_sampler(part)


def test_a_file_is_read_again_when_it_was_edited(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = "from __future__ import annotations\nfrom dataclasses import dataclass\n\n\n"
    source += "@dataclass(frozen=True)\nclass Scale:\n    by: float = 2.0\n\n"
    source += "    def __call__(self, logits, histories):\n"
    (tmp_path / "mine.py").write_text(source + "        return logits * self.by\n")
    part = CustomPart(path="mine.py:Scale", arguments={"by": 3.0})
    assert plain(part)(LOGITS, []).tolist() == [[3.0, 6.0, 12.0]]
    assert type(load_filter(part)) is type(load_filter(part))
    (tmp_path / "mine.py").write_text(source + "        return logits + self.by\n")
    assert plain(part)(LOGITS, []).tolist() == [[4.0, 5.0, 7.0]]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "write package.module:Name or folder/file.py:Name"),
        (":Name", "write package.module:Name"),
        ("no.such.package:Name", "no.such.package cannot be imported: ModuleNotFoundError"),
        ("no/such/file.py:Name", "there is no file no/such/file.py"),
        (PARTS + "Bann", "has no 'Bann'; did you mean 'Ban'"),
        (PARTS + "NotCallable", r"not callable; it needs __call__\(self, logits, histories\)"),
        (PARTS + "RaisesWhenBuilt", "could not be built with no arguments: RuntimeError: no such table"),
        (PARTS + "OneArgument", r"takes \(logits\), must take \(logits, histories\)"),
    ],
)
def test_a_filter_that_cannot_be_is_reported_in_one_line(path, message):
    refuses(message, lambda: load_filter(CustomPart(path=path)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("OnlyStarts", r"has no choose; a sampler needs choose\(logits, uniform, state\)"),
        ("Ban", r"has no start; a sampler needs start\(\)"),
    ],
)
def test_a_sampler_that_cannot_be_is_reported_in_one_line(name, message):
    refuses(message, lambda: load_sampler(CustomPart(path=PARTS + name)))


def test_wrong_arguments_and_broken_files(tmp_path):
    refuses(
        r"Ban: could not be built with tokn=1: TypeError",
        lambda: load_filter(CustomPart(path=PARTS + "Ban", arguments={"tokn": 1})),
    )
    (tmp_path / "broken.py").write_text("def f(:\n")
    for _ in range(2):  # a file that failed once is not taken for loaded
        refuses(
            "broken.py cannot be imported: SyntaxError",
            lambda: load_filter(CustomPart(path=f"{tmp_path / 'broken.py'}:f")),
        )
