"""Read a body field by field: every field is carried out, without effect here, or refused by name.

A class for each body lists what is carried out, with types; `REFUSED` and `IGNORED` list the protocol's other fields
with the reason. Nothing else is taken.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from workbench.errors import WorkbenchError, explain_by_path, nearest
from workbench.serve.errors import ApiError

TAG = re.compile(r"<\w+>")  # of a member of a union, in a path of pydantic's


def _whole(value: Any) -> Any:
    """Take 8.0 for 8, as JSON Schema does; leave texts and booleans to be refused."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]  # a whole number, also as 8.0; no text, no boolean
TokenCount = Annotated[Int, Field(ge=1, lt=2**31)]
Seed = Annotated[Int, Field(ge=-(2**63), le=2**64 - 1)]


@dataclass(frozen=True)
class Refused:
    """The reason why a field is refused, and the values that say nothing and are taken: null always."""

    reason: str
    neutral: tuple[Any, ...] = ()


class Body(BaseModel):
    """The body of a request. Values are of the types of JSON: `"8"` is no number, `0` no boolean."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())

    REFUSED: ClassVar[Mapping[str, Refused]] = {}
    IGNORED: ClassVar[Mapping[str, str]] = {}


BodyType = TypeVar("BodyType", bound=Body)


def read_body(kind: type[BodyType], given: Mapping[str, Any]) -> tuple[BodyType, dict[str, str]]:
    """Return a validated body, and the fields of `given` that have no effect here with the reason.

    Raises:
        ApiError: invalid_request_error with the first field that is wrong, refused or unknown as `param`.
    """
    ignored: dict[str, str] = {}
    taken: dict[str, Any] = {}
    for name, value in given.items():
        if name in kind.model_fields:
            taken[name] = value
        elif name in kind.REFUSED:
            refused = kind.REFUSED[name]
            if value is not None and not any(value == each and type(value) is type(each) for each in refused.neutral):
                raise ApiError(
                    "invalid_request_error", f"{name}: is not supported: {refused.reason}", name, "unsupported"
                )
        elif name in kind.IGNORED:
            if value is not None:
                ignored[name] = kind.IGNORED[name]
        else:
            known = [*kind.model_fields, *kind.REFUSED, *kind.IGNORED]
            raise ApiError(
                "invalid_request_error", f"{name}: unknown field{nearest(name[:200], known)}", name, "unknown"
            )
    try:
        return kind.model_validate(taken, context=ignored), ignored
    except ValidationError as error:
        raise invalid(error, kind) from None


def check_fields(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse a field of an object within a body that is none of `known`; null says nothing (ApiError)."""
    for name, value in given.items():
        if name not in known and value is not None:
            place = f"{where}.{name[:100]}"
            raise ApiError(
                "invalid_request_error", f"{place}: unknown field{nearest(name[:100], known)}", place, "unknown"
            )


def invalid(error: Exception, kind: type | None = None) -> ApiError:
    """Return the error of a body for a pydantic error or a WorkbenchError, with the path of the field."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        path, message = explain_by_path(error, kind or object)[0]
        place = ".".join(each for each in path if not TAG.fullmatch(each))
        return ApiError("invalid_request_error", message.replace(".".join(path), place, 1), place)
    assert isinstance(error, WorkbenchError)
    words = str(error)
    path = words.split(":", 1)[0]
    return ApiError("invalid_request_error", words, path if " " not in path else "")
