"""A run that is interrupted at any moment leaves nothing that could pass for a whole one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.interrupted import interrupted, lines_of
from tests.measure.small import TINY, asked
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.figures.figure import Figure
from workbench.measure import compare_variants as comparison
from workbench.measure import run as study_run
from workbench.measure.run import run
from workbench.runs import open_runs
from workbench.runs.condition import MARKER, check_folder
from workbench.runs.folder import RunFolder, writing
from workbench.runs.record import Record

KINDS = {"requests": (), "variants": ("variants={a: {}, b: {cache.page_size: 16}}",)}


def experiment(kind: str) -> Experiment:
    return asked(TINY, "workload={kind: random, requests: 1, prompt_tokens: 3, output_tokens: 2}", *KINDS[kind])


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Leave out slow calls that write nothing: reading the environment, drawing."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (study_run, comparison):
            patch.setattr(module, "environment", dict)
        patch.setattr(Figure, "render", lambda *_: b"")
        yield


@pytest.fixture(scope="module")
def lengths(quick: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    found = {}
    for kind in KINDS:
        run(experiment(kind), tmp_path_factory.mktemp(kind), progress=False)  # what is done once is not counted
        place = tmp_path_factory.mktemp(kind)
        found[kind] = lines_of(lambda kind=kind, place=place: run(experiment(kind), place, progress=False))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_at_any_moment(kind: str, lengths: dict[str, int]) -> None:
    @settings(max_examples=tries(4), deadline=None)
    @given(st.one_of(st.integers(0, lengths[kind]), st.integers(0, 300), st.integers(1, 600).map(lambda n: -n)))
    def at(line: int) -> None:
        with TemporaryDirectory() as place:
            left = interrupted(lambda: run(experiment(kind), place, progress=False), line % lengths[kind])
            here = [path for path in Path(place).iterdir() if not path.name.startswith(".")]
            assert len(here) <= 1
            for path in here:
                state = check_folder(path).state
                assert state in ("complete", "killed"), "no process writes it any more"
                if state == "complete":
                    Record.open(path).verify()
                else:
                    assert left
                    with pytest.raises(WorkbenchError, match=r"unfinished \(it was (killed or )?interrupted\)"):
                        Record.open(path)
            if here:
                states = open_runs(place).select(["run", "state"]).to_pylist()
                assert [row["state"] == "complete" for row in states] == [check_folder(here[0]).state == "complete"]
            again = run(experiment(kind), place, progress=False)
            assert again.complete and again.path not in here

    at()


def test_a_folder_that_is_left_says_so_and_one_that_is_whole_stays(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), writing(tmp_path, "left") as folder:
        assert check_folder(folder.path).state == "running"
        raise ZeroDivisionError
    assert check_folder(folder.path).state == "killed" and "not finished." in (folder.path / MARKER).read_text()
    with pytest.raises(ZeroDivisionError), writing(tmp_path, "whole") as folder:
        folder.finish()
        raise ZeroDivisionError
    assert check_folder(folder.path).state == "complete"


def test_the_law_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: dict[str, int]) -> None:
    monkeypatch.setattr(RunFolder, "abandon", lambda self, why: None)
    assert interrupted(lambda: run(experiment("requests"), tmp_path, progress=False), lengths["requests"] // 2)
    (path,) = tmp_path.iterdir()
    assert check_folder(path).state == "running"
