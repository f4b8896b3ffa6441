"""Import the public names of a package when they are first used: `import workbench` alone loads no torch.

A facade states what it offers once, as imports below `if TYPE_CHECKING:`, where type checkers and editors read it too.
"""

from __future__ import annotations

import functools
import importlib
import sys

TYPE_CHECKING = False  # that of `typing`, which takes as long to import as the rest of `import workbench`
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def attach(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of the facade `module`, whose source is read when a name is asked for."""

    @functools.cache
    def homes() -> dict[str, str]:
        import ast

        loader: Any = sys.modules[module].__loader__
        offered: Any = next(node for node in ast.parse(loader.get_source(module)).body if isinstance(node, ast.If))
        return {alias.name: node.module for node in offered.body for alias in node.names}

    def fetch(name: str) -> Any:
        if name == "__all__":
            return sorted(homes())
        if name not in homes():
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, inner = homes()[name], f"{module}.{name}"
        if home == module or home.startswith(f"{inner}."):  # a package below this one; `serve` can be called
            return importlib.import_module(inner)
        return getattr(__import__(home, fromlist=[name]), name)

    return fetch, lambda: sorted(homes())
