"""The shape of the library, held: the field's words, one class of a name, no circle of imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.structure import circles, duplicated_classes, imports, modules, private_words, relative_docstrings

MODULES = modules()


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside of functions, and for types alone, are counted too."""
    assert circles(imports(MODULES)) == []


def test_a_public_class_name_stands_once() -> None:
    assert duplicated_classes(MODULES) == {}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_words_are_the_fields(name: str) -> None:
    """Identifiers, docstrings, comments and messages use the words of the glossary (PRIVATE_WORDS lists ours)."""
    text = MODULES[name].read_text(encoding="utf-8")
    found = private_words(text)
    assert not found, "; ".join(f"{MODULES[name]}:{line}: {word!r}: say {better}" for line, word, better in found)
    clauses = relative_docstrings(text)
    assert not clauses, "; ".join(f"{MODULES[name]}:{line}: {words!r} is no sentence" for line, words in clauses)


def test_each_check_can_fail(tmp_path: Path) -> None:
    package = tmp_path / "workbench"
    package.mkdir()
    (package / "a.py").write_text(
        '"""What it is."""\n\n\nclass Same: ...\n\n\ndef f(holdings):\n    from workbench import b\n'
    )
    (package / "b.py").write_text("import workbench.a\n\n\nclass Same: ...  # everybody told nobody\n")
    files = modules(tmp_path)
    assert len(circles(imports(files))) == 1 and list(duplicated_classes(files)) == ["Same"]
    assert [word for _, word, _ in private_words(files["workbench.a"].read_text())] == ["holdings"]
    assert {word for _, word, _ in private_words(files["workbench.b"].read_text())} == {"told", "nobody"}
    assert len(relative_docstrings(files["workbench.a"].read_text())) == 1
