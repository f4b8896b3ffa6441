"""Conformity kits: hold your own variant to the laws the workbench's parts obey. They need hypothesis."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.testing.samplers import check_sampler

__all__ = ["check_sampler"]


def __getattr__(name: str) -> object:
    if name == "check_sampler":
        from workbench.testing.samplers import check_sampler

        return check_sampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
