"""Settings for the prefix cache and for offloading pages of preempted sequences."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from workbench.settings import Count, Settings

PreemptionMode = Literal["auto", "recompute", "offload"]


class NoPrefixCache(Settings):
    """Compute every prompt: no prefix cache."""

    kind: Literal["off"] = "off"


class RadixPrefixCache(Settings):
    """Find full pages again by their tokens; `ttl` is their lifetime in seconds after the last use.

    Requests may pin prefixes of their prompts, up to a fraction `pinned_share` of the pages; pinned pages are evicted
    last. A tenant (the requests of one `cache_salt`) may pin a fraction `tenant_pinned_share` of these; requests
    without a salt may pin all.
    """

    kind: Literal["radix"] = "radix"
    ttl: Annotated[float, Field(gt=0)] | None = None
    pinned_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    tenant_pinned_share: Annotated[float, Field(ge=0, le=1)] = 0.5


class NoOffload(Settings):
    """Recompute a preempted sequence: no offloading."""

    kind: Literal["none"] = "none"


class MemoryOffload(Settings):
    """Swap pages out to CPU memory of at most `bytes`."""

    kind: Literal["memory"] = "memory"
    bytes: Count = 2**30


class FileOffload(Settings):
    """Swap pages out to a memory-mapped file of `bytes`, which is removed with the runner."""

    kind: Literal["file"] = "file"
    path: str  # path of the file to create
    bytes: Count = 2**30


def _prefix_by_kind(value: Any) -> Any:
    """Accept a bare kind; YAML reads an unquoted `off` as False."""
    if isinstance(value, dict) and value.get("kind") is False:
        return {**value, "kind": "off"}
    return {"kind": "off" if value is False else value} if isinstance(value, str | bool) else value


def _offload_by_kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


PrefixCacheSetting = Annotated[
    Annotated[NoPrefixCache | RadixPrefixCache, Field(discriminator="kind")],
    BeforeValidator(_prefix_by_kind),
]
OffloadSetting = Annotated[
    Annotated[NoOffload | MemoryOffload | FileOffload, Field(discriminator="kind")],
    BeforeValidator(_offload_by_kind),
]
