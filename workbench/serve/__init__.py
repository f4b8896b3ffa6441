"""Serve models over HTTP: OpenAI's and Anthropic's protocols over one runner's thread.

The package can be called: `workbench.serve(runner)` is `workbench.serve.server.serve(runner)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A package that can be called as its main function, which is imported on the first call."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from workbench.serve.server import serve

        return serve(*arguments, **options)

    @property
    def __signature__(self) -> Any:
        import inspect

        from workbench.serve.server import serve

        return inspect.signature(serve)


sys.modules[__name__].__class__ = _CallablePackage
