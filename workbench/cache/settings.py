"""What becomes of pages that no running sequence holds, as values of an experiment."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from workbench.errors import WorkbenchError
from workbench.shown import Brief

Bytes = Annotated[int, Field(ge=1)]


class Part(Brief, BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NoPrefix(Part):
    """Every prompt is computed."""

    kind: Literal["off"] = "off"


class RadixPrefix(Part):
    """Full pages are found again by their tokens; `ttl` is their life time in seconds after the last use."""

    kind: Literal["radix"] = "radix"
    ttl: Annotated[float, Field(gt=0)] | None = None


class NoOffload(Part):
    """A sequence that is set back is computed again."""

    kind: Literal["none"] = "none"


class MemoryOffload(Part):
    """Its pages lie in host memory, `bytes` at most."""

    kind: Literal["memory"] = "memory"
    bytes: Bytes = 2**30


class FileOffload(Part):
    """Its pages lie in a file of `bytes` that is mapped into memory and is gone with the runner."""

    kind: Literal["file"] = "file"
    path: str
    bytes: Bytes = 2**30


def _named(value: Any) -> Any:
    """A kind alone is enough; YAML reads a bare `off` as False."""
    if isinstance(value, dict) and value.get("kind") is False:
        return {**value, "kind": "off"}
    return {"kind": "off" if value is False else value} if isinstance(value, str | bool) else value


def _kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


Prefix = Annotated[
    Annotated[NoPrefix | RadixPrefix, Field(discriminator="kind")],
    BeforeValidator(_named),
]
Offload = Annotated[
    Annotated[NoOffload | MemoryOffload | FileOffload, Field(discriminator="kind")],
    BeforeValidator(_kind),
]
_PREFIX: TypeAdapter[NoPrefix | RadixPrefix] = TypeAdapter(Prefix)
_OFFLOAD: TypeAdapter[NoOffload | MemoryOffload | FileOffload] = TypeAdapter(Offload)


def prefix_from(value: Any) -> NoPrefix | RadixPrefix:
    """`off`, `radix`, a mapping or the value itself."""
    return _from(_PREFIX, value, "prefix", "off or radix, or {kind: radix, ttl: 600}")


def offload_from(value: Any) -> NoOffload | MemoryOffload | FileOffload:
    """`none`, `memory`, a mapping or the value itself."""
    return _from(_OFFLOAD, value, "offload", "none or memory, or {kind: file, path: ..., bytes: ...}")


def _from(adapter: TypeAdapter, value: Any, name: str, right: str) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise WorkbenchError(f"{name}: {place + ': ' if place else ''}{fault['msg']}; give {right}") from None
