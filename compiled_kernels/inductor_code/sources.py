"""The kernels inside a module that Inductor wrote: their source in C++ or Triton, by name."""

from __future__ import annotations

import ast

LANGUAGES = {"cpp_pybinding": "cpp", "cpp": "cpp", "triton": "triton"}  # methods of async_compile


def kernels(code: str) -> dict[str, dict[str, str]]:
    """Return {"cpp" or "triton": {kernel's name: its source}}; other languages are left out."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.walk(ast.parse(code)):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        method, target = node.value.func, node.targets[0]
        if not (isinstance(method, ast.Attribute) and isinstance(target, ast.Name) and method.attr in LANGUAGES):
            continue
        texts = [each.value for each in node.value.args if isinstance(each, ast.Constant)]
        text = max((each for each in texts if isinstance(each, str)), key=len, default="")
        found.setdefault(LANGUAGES[method.attr], {})[target.id] = text
    return found
