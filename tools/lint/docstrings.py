"""Check that docstrings open with a sentence, and document only parameters that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tools.lint.tree import ROOT, texts

RELATIVE = re.compile(r"(?:What|Which|Who|Whose|Whom|Whether|How|Why|Where|When|That)\b")
_OPENS_RELATIVE = re.compile(rf"(?:\"\"\"|''')\s*{RELATIVE.pattern}")


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield docstrings that open with a relative clause, and documented arguments that are not parameters."""
    for path, text in texts(root).items():
        if path != "tests/test_lint.py":  # plants them
            for line, words in relative_docstrings(text):
                yield f"{path}:{line}: {words!r} is no sentence; open with a verb and its object"
            for line, name in unknown_arguments(text) if path.endswith(".py") else ():
                yield f"{path}:{line}: {name!r} below Args is no parameter and no field; name one"


def relative_docstrings(text: str) -> list[tuple[int, str]]:
    """Return (line, first words) of docstrings that open with a relative clause.

    A text that is not Python as a whole (Markdown, a notebook with commands of its kernel) is read line by line: every
    triple quote counts as a docstring there."""
    if not _OPENS_RELATIVE.search(text):
        return []
    try:
        tree = ast.parse(text)
    except SyntaxError:
        opened = [(match, match.end() - len(match[0].strip("\"' \n"))) for match in _OPENS_RELATIVE.finditer(text)]
        return [(text.count("\n", 0, at) + 1, " ".join(text[at:].split()[:6])) for _, at in opened]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and RELATIVE.match(doc):
                found.append((getattr(node, "lineno", 1), " ".join(doc.split()[:6])))
    return found


def unknown_arguments(text: str) -> list[tuple[int, str]]:
    """Return (line, name) of names below `Args:` in a docstring that are no parameter of the function, or no field of
    the class.

    A class has the parameters of its `__init__` and the fields of itself and of its bases in the same file."""
    if "Args:" not in text:
        return []
    tree = ast.parse(text)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return [
        (node.lineno, name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for name in _documented_arguments(ast.get_docstring(node) or "")
        if name not in _arguments(node, classes)
    ]


def _documented_arguments(docstring: str) -> Iterator[str]:
    section = re.search(r"^Args:\n((?: .*\n|\n)*)", docstring + "\n", re.MULTILINE)
    for names in re.findall(r"^ {4}(\S[^:]*):", section[1] if section else "", re.MULTILINE):
        yield from (name.strip(" *`") for name in names.split(","))


def _arguments(node: ast.AST, classes: dict[str, ast.ClassDef]) -> set[str]:
    found = set[str]()
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        each = node.args
        listed = (*each.posonlyargs, *each.args, *each.kwonlyargs, each.vararg, each.kwarg)
        found = {argument.arg for argument in listed if argument is not None}
    elif isinstance(node, ast.ClassDef):
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                found.add(part.target.id)
            elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
                found |= _arguments(part, classes)
        for base in node.bases:
            found |= _arguments(classes.get(getattr(base, "id", ""), base), classes)
    return found
