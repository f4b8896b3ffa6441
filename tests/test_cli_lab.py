"""`workbench lab`: where it finds notebooks, and with whom a kernel may speak."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.lab import start, stay_home


def test_the_folder_is_found_from_below_and_holds_percent_files_and_lone_ipynb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "notebooks"
    (folder / "deep").mkdir(parents=True)
    for name in ("01_one.py", "01_one.ipynb", "02_two.ipynb", "helper.py"):
        (folder / name).write_text("x = 1\n" if name == "helper.py" else "# %%\nx = 1\n")
    monkeypatch.chdir(folder / "deep")
    assert start.notebooks_folder() == folder
    assert [path.name for path in start.notebooks_in(folder)] == ["01_one.py", "02_two.ipynb"]


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
