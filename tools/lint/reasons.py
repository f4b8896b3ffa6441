"""Check that every ignored checker message and every skipped test has a reason beside it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tools.lint.tree import ROOT, python

IGNORED = re.compile(r"#\s*(?:type: ignore|pyright: ignore|noqa)(?:\[[\w, -]+\]|: \w+)?\s*$")


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield ignored checker messages in the library, and skips in tests, without a reason."""
    for package in ("workbench", "compiled_kernels"):
        for path, text in python(root, package):
            for line in unexplained(text):
                yield f"{path}:{line}: ignores without a reason; write `# type: ignore[code] (the reason)`"
    for path, text in python(root, "tests"):
        for line in skips_without_reason(text):
            yield f"{path}:{line}: skips without a reason; give `reason=`"


def unexplained(text: str) -> list[int]:
    """Return the lines with a `type: ignore` or `noqa` that has no reason after it, in parentheses or after a `#`."""
    if not re.search(IGNORED.pattern, text, re.MULTILINE):
        return []
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [each.start[0] for each in tokens if each.type == tokenize.COMMENT and IGNORED.search(each.string)]


def skips_without_reason(text: str) -> list[int]:
    """Return the lines with a call of skip, skipif or importorskip that gives no reason."""
    found = []
    for node in ast.walk(ast.parse(text)) if re.search(r"\bskip|importorskip", text) else ():
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        reasons = [each.value for each in node.keywords if each.arg == "reason"]
        reasons += node.args[:1] if name == "skip" else []
        if name in ("skip", "skipif", "importorskip") and not reasons:
            found.append(node.lineno)
    return found
