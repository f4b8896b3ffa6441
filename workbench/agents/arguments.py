"""Hold the arguments of a call against the tool's schema, and make of them what its function's type hints say."""

from __future__ import annotations

import enum
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from workbench.errors import WorkbenchError, nearest

TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: _is_number(value) and (isinstance(value, int) or value.is_integer()),
    "number": lambda value: _is_number(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
MAX_DEPTH = 64


def find_fault(value: Any, schema: Any, path: str = "", depth: int = 0) -> str:
    """Return what is wrong with a value under a schema, with its path; empty if nothing is.

    It looks at types, choices, required and unknown properties, items and bounds; other keywords and `$ref` it passes.
    Not `jsonschema`: a schema's patterns come from outside, and there they would run in Python's `re`, without a limit.
    """
    if depth > MAX_DEPTH or not isinstance(schema, Mapping):
        return ""
    if schema.get("nullable") is True and value is None:
        return ""
    where = path or "the arguments"
    kinds = schema.get("type")
    listed = [kinds] if isinstance(kinds, str) else [each for each in kinds or () if each in TYPES]
    if listed and not any(TYPES.get(each, lambda _: True)(value) for each in listed):
        return f"{where}: must be {' or '.join(listed)}, not {_short(value)}"
    if "const" in schema and not _is_same(value, schema["const"]):
        return f"{where}: must be {_short(schema['const'])}, not {_short(value)}"
    if isinstance(schema.get("enum"), list) and not any(_is_same(value, each) for each in schema["enum"]):
        hint = nearest(value, [e for e in schema["enum"] if isinstance(e, str)]) if isinstance(value, str) else ""
        return f"{where}: must be one of {', '.join(map(_short, schema['enum'][:20]))}, not {_short(value)}{hint}"
    for key in ("anyOf", "oneOf"):
        members = schema.get(key)
        if isinstance(members, list) and members:
            faults = [find_fault(value, each, path, depth + 1) for each in members]
            if all(faults):
                return faults[0] if len(faults) == 1 else f"{where}: is none of {len(faults)} kinds ({faults[0]})"
    for each in schema.get("allOf") or ():
        if fault := find_fault(value, each, path, depth + 1):
            return fault
    if isinstance(value, dict):
        return _object_fault(value, schema, path, depth)
    if isinstance(value, list):
        return _list_fault(value, schema, path, depth)
    return _bound_fault(value, schema, where)


def _object_fault(value: dict[str, Any], schema: Mapping[str, Any], path: str, depth: int) -> str:
    known = schema.get("properties") or {}
    where = path or "the arguments"
    missing = [name for name in schema.get("required") or () if name not in value]
    if missing:
        return f"{where}: {missing[0]!r} is missing"
    open_ended = schema.get("additionalProperties", bool(path) or not known)
    for name, each in value.items():
        if name not in known and not schema.get("patternProperties"):
            if open_ended is False:
                hint = nearest(name, known) or f"; known: {', '.join(known) or 'none'}"
                return f"{where}: {name!r} is unknown{hint}"
            below: Any = open_ended
        else:
            below = known.get(name)
        if fault := find_fault(each, below, f"{path}.{name}" if path else name, depth + 1):
            return fault
    return ""


def _list_fault(value: list[Any], schema: Mapping[str, Any], path: str, depth: int) -> str:
    if fault := _length_fault(len(value), schema, path, "Items", "items"):
        return fault
    first = schema.get("prefixItems") or ()
    for number, each in enumerate(value):
        below = first[number] if number < len(first) else schema.get("items")
        if fault := find_fault(each, below, f"{path}[{number}]", depth + 1):
            return fault
    return ""


def _length_fault(size: int, schema: Mapping[str, Any], where: str, key: str, unit: str) -> str:
    least, most = schema.get(f"min{key}") or 0, schema.get(f"max{key}")
    if size >= least and (most is None or size <= most):
        return ""
    return f"{where}: must have {least} to {'any number of' if most is None else most} {unit}, not {size}"


def _bound_fault(value: Any, schema: Mapping[str, Any], where: str) -> str:
    if isinstance(value, str):
        return _length_fault(len(value), schema, where, "Length", "characters")
    if _is_number(value):
        tests = {
            "minimum": lambda bound: value < bound, "exclusiveMinimum": lambda bound: value <= bound,
            "maximum": lambda bound: value > bound, "exclusiveMaximum": lambda bound: value >= bound,
        }  # fmt: skip
        for key, fails in tests.items():
            if _is_number(schema.get(key)) and fails(schema[key]):
                return f"{where}: {_short(value)} breaks {key} {schema[key]}"
    return ""


def convert_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as a function's type hints say: members of an Enum, sets, tuples, pydantic models.

    Plain JSON types stay as they came: no integer becomes a float.

    Raises:
        WorkbenchError: if one cannot be made.
    """
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # of a callable without readable hints: it takes what the schema allows
        return dict(arguments)
    made = dict(arguments)
    for name, value in arguments.items():
        hint = hints.get(name)
        if hint is not None and _needs_conversion(hint):
            try:
                made[name] = TypeAdapter(hint).validate_python(value)
            except ValidationError as error:
                fault = error.errors()[0]
                place = ".".join(map(str, (name, *fault["loc"])))
                raise WorkbenchError(f"{place}: {fault['msg']}, not {_short(value)}") from None
    return made


def _needs_conversion(hint: Any) -> bool:
    if typing.get_origin(hint) is typing.Literal:
        return False
    kind = typing.get_origin(hint) or hint
    if isinstance(kind, type) and issubclass(kind, enum.Enum | BaseModel | tuple | set | frozenset):
        return True
    return any(_needs_conversion(each) for each in typing.get_args(hint))


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal as JSON: true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
