"""A research workbench for LLM inference.

    >>> import workbench
    >>> prompt, text = "def fib(n):", ""
    >>> runner = workbench.load("demo", lane="eager")  # without a lane: the fastest that works here
    >>> for event in runner.stream(prompt, max_tokens=64):
    ...     text += event.text
    >>> print(prompt + text)  # doctest: +ELLIPSIS
    def fib(n):...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.engine.beam_search import beam_search
    from workbench.engine.load import load
    from workbench.errors import WorkbenchError
    from workbench.request import Request, SamplingParameters
    from workbench.user_parts import register

__version__ = "0.1.0"
__all__ = ["Request", "SamplingParameters", "WorkbenchError", "__version__", "beam_search", "load", "register"]

_HOMES = {
    "beam_search": "workbench.engine.beam_search",
    "load": "workbench.engine.load",
    "Request": "workbench.request",
    "SamplingParameters": "workbench.request",
    "WorkbenchError": "workbench.errors",
    "register": "workbench.user_parts",
}


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]


def __getattr__(name: str) -> Any:
    """Names are fetched when first used: `import workbench` alone loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
