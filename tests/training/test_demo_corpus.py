from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tools.training import demo_corpus, train_demo


def write(folder: Path, name: str, content: bytes = b"x = 1\n") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library of 300 modules, and all that is no part of one."""
    folder = tmp_path / "lib" / "site-packages" / "python3.11"  # the names above the library do not matter
    for number in range(300):
        write(folder, f"package{number % 7}/module{number}.py", f"value = {number}\n".encode())
    for name in ("site-packages/numpy/core.py", "dist-packages/apt.py", "json/__pycache__/old.py"):
        write(folder, name)
    for name in ("_sysconfigdata__linux.py", "_sysconfig_vars.py", "config-3.11-x86/python-config.py"):
        write(folder, name)
    write(folder, "test/latin.py", b"name = '\xe9'\n")
    write(folder, "empty/__init__.py", b"")
    write(folder, "notes.txt")
    (folder / "folder.py").mkdir()
    (folder / "nowhere.py").symlink_to(folder / "missing.py")
    return folder


def test_every_module_of_the_library_and_nothing_else(library):
    names = [file.name for file in demo_corpus.source_files(library)]
    assert set(names) == {f"package{number % 7}/module{number}.py" for number in range(300)}
    assert names == sorted(names)


def test_the_two_sides_are_disjoint_and_cover_everything(library, monkeypatch):
    monkeypatch.setattr(demo_corpus, "library_folder", lambda: library)
    every = {file.name for file in demo_corpus.source_files()}
    training = {file.name for file in demo_corpus.training_files()}
    held_out = {file.name for file in demo_corpus.held_out_files()}
    assert training | held_out == every and not training & held_out
    assert 3 <= len(held_out) <= 40  # one in twenty of 300


def test_the_name_alone_chooses_the_side(library, tmp_path):
    before = {file.name: file.held_out for file in demo_corpus.source_files(library)}
    moved = tmp_path / "elsewhere"
    library.rename(moved)
    for file in demo_corpus.source_files(moved):
        file.path.write_bytes(b"# other content\n" + file.path.read_bytes())
    write(moved, "another.py")
    after = {file.name: file.held_out for file in demo_corpus.source_files(moved)}
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"another.py"}
    for name, held_out in after.items():
        assert held_out == (int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0)


def test_the_text_of_a_file_is_its_bytes(library):
    content = "a = 'é'\r\nb = 2\r".encode()
    write(library, "ends.py", content)
    (file,) = (file for file in demo_corpus.source_files(library) if file.name == "ends.py")
    assert file.text().encode() == content
    assert file.sha256() == hashlib.sha256(content).hexdigest()


def test_the_manifest_records_every_file(library):
    files = demo_corpus.source_files(library)
    rows = json.loads(json.dumps(demo_corpus.manifest(files)))["files"]
    assert [row["name"] for row in rows] == [file.name for file in files]
    for row in rows:
        content = (library / row["name"]).read_bytes()
        assert (row["bytes"], row["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    sides = [row["side"] for row in rows]
    assert sides == ["held_out" if file.held_out else "training" for file in files]
    assert set(sides) == {"held_out", "training"}


def test_the_running_librarys_held_out_files_exist_and_are_never_trained_on():
    held_out = train_demo.held_out_files()
    assert len(held_out) > 10 and all(path.is_file() for path in held_out)
    assert not {"site-packages", "dist-packages"} & {
        part for path in held_out for part in path.relative_to(demo_corpus.library_folder()).parts
    }
    assert not set(held_out) & {file.path for file in demo_corpus.training_files()}
