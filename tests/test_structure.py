"""The shape of the library, held: the field's words, one class of a name, no circle of imports."""

from __future__ import annotations

import json
from inspect import cleandoc
from pathlib import Path

import pytest

from tools.structure import (
    EXCEPTIONS,
    circles,
    duplicated_classes,
    imports,
    imports_from_elsewhere,
    modules,
    private_words,
    refused_words,
    relative_docstrings,
    skips_without_reason,
    texts,
    unexplained,
    unknown_arguments,
)

MODULES, TEXTS = modules(), texts()
SELF = "tests/test_structure.py"


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside of functions, and for types alone, are counted too."""
    assert circles(imports(MODULES)) == []


def test_a_public_class_name_stands_once() -> None:
    assert duplicated_classes(MODULES) == {}


def test_a_name_is_imported_from_the_file_that_defines_it() -> None:
    assert imports_from_elsewhere(MODULES) == []


def test_what_a_checker_ignores_has_a_reason_beside_it() -> None:
    found = {name: lines for name, path in MODULES.items() if (lines := unexplained(path.read_text(encoding="utf-8")))}
    assert not found, "write `# type: ignore[code] (the reason)`"


def test_a_skip_has_a_reason() -> None:
    tests = {path: text for path, text in TEXTS.items() if path.startswith("tests/") and path.endswith(".py")}
    assert len(tests) > 100
    assert {path: lines for path, text in tests.items() if (lines := skips_without_reason(text))} == {}


@pytest.mark.parametrize("folder", sorted({path.split("/")[0] for path in TEXTS}))
def test_words_are_the_fields(folder: str) -> None:
    """Names, docstrings, comments, messages and Markdown use the glossary's words (see PRIVATE_WORDS)."""
    found = [
        f"{path}:{line}: {word!r}: say {better}"
        for path, text in TEXTS.items()
        if path.split("/")[0] == folder
        for line, word, better in refused_words(path, text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", sorted({path.split("/")[0] for path in TEXTS}))
def test_no_docstring_opens_with_a_relative_clause(folder: str) -> None:
    found = [
        f"{path}:{line}: {words!r} is no sentence"
        for path, text in TEXTS.items()
        if path.split("/")[0] == folder and path not in (SELF, "tools/structure.py")
        for line, words in relative_docstrings(text)
    ]
    assert not found, "\n".join(found)


def test_arguments_in_docstrings_are_parameters() -> None:
    found = {path: names for path, text in TEXTS.items() if path.endswith(".py") and (names := unknown_arguments(text))}
    assert not found


def test_every_exception_is_needed() -> None:
    """An exception whose file no longer holds the word would hide the next one."""
    for path, words in EXCEPTIONS.items():
        held = {word for _, word, _ in private_words(TEXTS[path])}
        assert held if words == ("*",) else held >= set(words), path


def test_each_check_can_fail(tmp_path: Path) -> None:
    package = tmp_path / "workbench"
    package.mkdir()
    (package / "a.py").write_text(
        '"""What it is."""\n\n\nclass Same: ...\n\n\ndef f(holdings):\n    from workbench import b\n'
    )
    (package / "b.py").write_text("import workbench.a\n\n\nclass Same: ...  # everybody told nobody\n")
    files = modules(tmp_path)
    assert len(circles(imports(files))) == 1 and list(duplicated_classes(files)) == ["Same"]
    read = texts(tmp_path)
    assert private_words(read["workbench/a.py"]) == [(7, "holdings", "KVCacheManager")]
    assert [word for _, word, _ in private_words(read["workbench/b.py"])] == ["everybody", "nobody", "told"]
    assert relative_docstrings(read["workbench/a.py"]) == [(1, "What it is.")]


def test_words_are_found_in_tests_notebooks_and_markdown(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# One request\n", "Nobody waits here."]},
        {
            "cell_type": "code",
            "source": ["%matplotlib inline\n", 'def f():\n    """Which of them?"""'],
            "outputs": ["told"],
        },
    ]
    for path, text in {
        "tests/test_a.py": "MOST_WORK = 1\n\n\ndef test_what_is_told():\n    HeldBack, setBack, set_backs\n",
        "notebooks/a.ipynb": json.dumps({"cells": cells}),
        "notebooks/b.py": "# %% [markdown]\n# A batch and its company.\n",
        "README.md": "A request is set back, which\nno lane notices. Planets estimate knobless told-you-so.\n",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    read = texts(tmp_path)
    found = {path: [(line, word) for line, word, _ in refused_words(path, text)] for path, text in read.items()}
    assert found == {
        "tests/test_a.py": [(1, "MOST_WORK"), (4, "told"), (5, "HeldBack"), (5, "setBack"), (5, "set_backs")],
        "notebooks/a.ipynb": [(2, "nobody")],
        "notebooks/b.py": [(2, "company")],
        "README.md": [(1, "set back"), (2, "lane"), (2, "told")],
    }
    assert relative_docstrings(read["notebooks/a.ipynb"]) == [(5, 'Which of them?"""')]
    assert refused_words("experiments/LOG.md", read["README.md"]) == []
    assert "lane" not in {word for _, word, _ in private_words("explanes planed lanes")}


def test_the_checks_of_names_and_reasons_can_fail(tmp_path: Path) -> None:
    package = tmp_path / "workbench"
    package.mkdir()
    (package / "a.py").write_text("from workbench import b\n")
    (package / "b.py").write_text("import workbench.a\n\n\nclass Same: ...\n")
    (package / "c.py").write_text("from workbench.a import b\nfrom workbench.b import workbench, Same\n")
    assert [each.split(": ")[1] for each in imports_from_elsewhere(modules(tmp_path))] == [
        "workbench.a has b from elsewhere",
        "workbench.b has workbench from elsewhere",
    ]
    ignored = "x = 1  # type: ignore[a]\nx = 1  # noqa: E1\nx = 1  # noqa: E1 (why)\nx = 1  # type: ignore[a]  # why\n"
    assert unexplained(ignored) == [1, 2]
    documented = """
    def f(a, b, *c):
        '''Do it.

        Args:
            a, b: both.
            c: more
                d: is text.
            e: no parameter.

        Returns:
            f: none.
        '''

    class Base:
        g: int

    class Child(Base):
        '''One.

        Args:
            g: of the base.
            h: of the constructor.
            i: none.
        '''

        def __init__(self, h): ...
    """
    assert unknown_arguments(cleandoc(documented)) == [(1, "e"), (17, "i")]
    skips = "skipif(a)\nskipif(a, reason='b')\npytest.skip()\npytest.skip('b')\npytest.importorskip('a')\n"
    assert skips_without_reason(skips) == [1, 3, 5]
