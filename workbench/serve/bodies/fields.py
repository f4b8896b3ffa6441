"""Validate a body field by field: every field is supported, ignored, or refused by name.

A class for each body declares the supported fields with types; `REFUSED` lists fields of the protocol, and of other
servers, that would change the answer, and `IGNORED` fields without effect on it. Unknown fields are ignored too, or
refused, as the server's `unknown_fields` says. Null counts as absent wherever a field may be left out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from workbench.errors import WorkbenchError, explain_by_path, nearest
from workbench.serve.errors import ApiError

TAG = re.compile(r"<\w+>")  # tag of a union member in pydantic's error paths


def _whole(value: Any) -> Any:
    """Convert 8.0 to 8, as JSON Schema does; leave texts and booleans to be refused."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]  # an integer, also as 8.0; no text, no boolean
TokenCount = Annotated[Int, Field(ge=1, lt=2**31)]
Seed = Annotated[Int, Field(ge=-(2**63), le=2**64 - 1)]


@dataclass(frozen=True)
class Refused:
    """The reason why a field is refused. Null, and the `neutral` values, which change nothing, are accepted."""

    reason: str
    neutral: tuple[Any, ...] = ()

    def is_neutral(self, value: Any) -> bool:
        return value is None or any(value == each and type(value) is type(each) for each in self.neutral)


# Fields that change an answer in protocols that have them; other protocols' bodies refuse them.
IN_CHATS = {
    name: Refused("this protocol has no such field; /v1/chat/completions has", neutral)
    for name, neutral in {
        "n": (1,), "seed": (), "frequency_penalty": (0, 0.0), "presence_penalty": (0, 0.0), "logit_bias": ({},),
        "min_p": (0, 0.0), "repetition_penalty": (1, 1.0), "ignore_eos": (False,), "stop_token_ids": ([],),
        "logprobs": (False,),
    }.items()
}  # fmt: skip

UNKNOWN = "unknown here"
MAX_IGNORED = 100  # maximum listed fields; a body may have more


class IgnoredFields(dict[str, str]):
    """The ignored fields of a body by path, with the reason. `is_strict`: unknown fields are refused."""

    def __init__(self, is_strict: bool = False):
        super().__init__()
        self.is_strict = is_strict

    def add(self, place: str, reason: str) -> None:
        if len(self) < MAX_IGNORED:
            self[place] = reason

    def add_all(self, more: Mapping[str, str]) -> None:
        for place, reason in more.items():
            self.add(place, reason)

    def unknown(self, place: str, known: Iterable[str]) -> None:
        """Record an unknown field as ignored; ApiError if `is_strict`."""
        if len(self) >= MAX_IGNORED and not self.is_strict:
            return
        front, dot, name = place.rpartition(".")
        place, hint = f"{front}{dot}{name[:100]}", nearest(name[:100], known)
        if self.is_strict:
            raise ApiError("invalid_request_error", f"{place}: unknown field{hint}", place, "unknown")
        self.add(place, f"{UNKNOWN}{hint}")

    def check(self, given: Mapping[str, Any], known: Collection[str], where: str) -> dict[str, Any]:
        """Return the object `given`, a part of a body, without the fields outside of `known`, which are recorded as
        ignored (ApiError if `is_strict`). An unknown field that is null counts as absent.
        """
        for name in given:
            if name not in known and given[name] is not None:
                self.unknown(f"{where}.{name}", known)
        return {name: value for name, value in given.items() if name in known}


class Body(BaseModel):
    """The body of a request. Values have JSON types: `"8"` is no number, `0` no boolean."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())

    REFUSED: ClassVar[Mapping[str, Refused]] = {}
    IGNORED: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> Any:
        """Return the schema of accepted bodies: with unknown fields, and null for optional fields."""
        whole = handler(core_schema)
        found = handler.resolve_ref_schema(whole)
        found.pop("additionalProperties", None)
        for name, each in found.get("properties", {}).items():
            if name not in found.get("required", ()) and {"type": "null"} not in each.get("anyOf", ()):
                found["properties"][name] = {"anyOf": [each, {"type": "null"}]}
        return whole

    @classmethod
    def takes(cls, name: str, value: Any) -> bool:
        """Return whether a field is supported and has a value other than null."""
        field = cls.carried_out().get(name)
        return field is not None and (value is not None or field.is_required())

    @classmethod
    @functools.cache
    def carried_out(cls) -> dict[str, FieldInfo]:
        """Return the supported fields, by the names that clients use."""
        return {field.alias or name: field for name, field in cls.model_fields.items()}


BodyType = TypeVar("BodyType", bound=Body)


def read_body(
    kind: type[BodyType], given: Mapping[str, Any], is_strict: bool = True
) -> tuple[BodyType, IgnoredFields]:
    """Return a validated body, and the ignored fields of `given` with the reason.

    Raises:
        ApiError: invalid_request_error with `param`, the first field that is wrong, refused or (with `is_strict`)
            unknown.
    """
    ignored, known = IgnoredFields(is_strict), kind.carried_out()
    taken: dict[str, Any] = {}
    for name, value in given.items():
        if name in known:
            if kind.takes(name, value):
                taken[name] = value
        elif name in kind.REFUSED:
            refused = kind.REFUSED[name]
            if not refused.is_neutral(value):
                raise ApiError(
                    "invalid_request_error", f"{name}: is not supported: {refused.reason}", name, "unsupported"
                )
        elif name in kind.IGNORED:
            if value is not None:
                ignored.add(name, kind.IGNORED[name])
        elif value is not None or is_strict:
            ignored.unknown(name, [*known, *kind.REFUSED, *kind.IGNORED])
    try:
        return kind.model_validate(taken, context=ignored), ignored
    except ValidationError as error:
        raise invalid(error, kind) from None


def invalid(error: Exception, kind: type | None = None) -> ApiError:
    """Return the error of a body for a pydantic error or a WorkbenchError, with the path of the field."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        path, message = explain_by_path(error, kind or object)[0]
        place = ".".join(each for each in path if not TAG.fullmatch(each))
        return ApiError("invalid_request_error", message.replace(".".join(path), place, 1), place)
    assert isinstance(error, WorkbenchError)
    found = ApiError("invalid_request_error", str(error))
    path = found.message.split(":", 1)[0]
    found.param = path if " " not in path else ""
    return found
