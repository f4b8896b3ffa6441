"""Conformity kits: check a custom variant against the laws of the workbench's own parts. They need hypothesis."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.testing.attention import check_attention
    from workbench.testing.eviction import check_evict
    from workbench.testing.kv_format import check_kv_format
    from workbench.testing.policies import check_policy
    from workbench.testing.programs import check_program
    from workbench.testing.proposers import check_proposer
    from workbench.testing.rankings import check_ranking, check_search
    from workbench.testing.samplers import check_sampler

__all__ = [
    "check_attention", "check_evict", "check_kv_format", "check_policy", "check_program", "check_proposer",
    "check_ranking", "check_sampler", "check_search",
]  # fmt: skip

_HOMES = {
    "check_attention": "workbench.testing.attention",
    "check_evict": "workbench.testing.eviction",
    "check_kv_format": "workbench.testing.kv_format",
    "check_policy": "workbench.testing.policies",
    "check_program": "workbench.testing.programs",
    "check_proposer": "workbench.testing.proposers",
    "check_ranking": "workbench.testing.rankings",
    "check_search": "workbench.testing.rankings",
    "check_sampler": "workbench.testing.samplers",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
