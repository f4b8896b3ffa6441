"""`workbench lab`: what it says where something is missing or does not go together, and where it finds notebooks."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.cli import main
from workbench.lab import start, stay_home
from workbench.lab import start as needs
from workbench.lab.start import notebooks_folder, notebooks_in

PERCENT = "# %%\nx = 1\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "notebooks" / "deep").mkdir(parents=True)
    (tmp_path / "notebooks" / "01_one.py").write_text(PERCENT)
    monkeypatch.chdir(tmp_path / "notebooks" / "deep")
    return tmp_path / "notebooks"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json"], "go with --check"),
        (["--check", "--dark"], "goes with --pictures"),
        (["--folder", "nowhere"], "no such folder"),
        (["--check", "07_none.py"], "no notebook 07_none.py"),
        (["a.py", "b.py"], "one notebook opens at a time"),
    ],
)
def test_a_mistake_is_one_line(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.notebooks.check.require", lambda *answers: None)
    assert main(["lab", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_what_is_missing_is_named_with_its_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    assert main(["lab"]) == 2
    assert "pip install 'inference-workbench[lab]'" in capsys.readouterr().err
    monkeypatch.setattr(needs, "find_spec", lambda name: name)
    monkeypatch.setattr(needs, "chromium", lambda: None)
    assert main(["lab", "--check"]) == 2
    assert "apt-get install chromium" in capsys.readouterr().err


def test_the_folder_is_found_from_below_and_holds_percent_files_and_lone_ipynb(folder: Path) -> None:
    assert notebooks_folder() == folder
    (folder / "helper.py").write_text("x = 1\n")
    (folder / "01_one.ipynb").write_text("{}")
    (folder / "02_two.ipynb").write_text("{}")
    assert [path.name for path in notebooks_in(folder)] == ["01_one.py", "02_two.ipynb"]


def test_jupyterlab_is_started_on_the_folder() -> None:
    words = start.command(Path("/n"), "05_sampling.py", 9000, browser=False)
    assert {"--ServerApp.root_dir=/n", "--port=9000", "--no-browser"} <= set(words)
    assert "--LabApp.default_url=/lab/tree/05_sampling.py" in words


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "0.0.0.0", "", None, b"127.0.0.1"])
def test_a_kernel_may_speak_with_its_own_machine(host: object) -> None:
    stay_home.watch("socket.getaddrinfo", (host, 80, 0, 0, 0))
    stay_home.watch("socket.connect", (None, (host, 80)))


@pytest.mark.parametrize("host", ["huggingface.co", "8.8.8.8", "2001:4860:4860::8888"])
def test_a_kernel_may_speak_with_no_other(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stay_home.LOG, str(tmp_path / "log"))
    for event, values in (("socket.getaddrinfo", (host, 80, 0, 0, 0)), ("socket.connect", (None, (host, 80)))):
        with pytest.raises(ConnectionError, match=host):
            stay_home.watch(event, values)
    assert (tmp_path / "log").read_text().split() == [host, host]
