"""Hold the arguments of a call against the tool's schema, and make of them what its function's type hints say."""

from __future__ import annotations

import enum
import typing
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import isfinite
from typing import Any
from urllib.parse import unquote

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
OPENS = frozenset(  # keywords beside `properties` that let an object have others
    ("additionalProperties", "patternProperties", "anyOf", "allOf", "oneOf", "$ref", "if", "dependentSchemas")
)


def find_fault(value: Any, schema: Any) -> str:
    """Return what is wrong with a value under a schema, with its path; empty if nothing is.

    Arguments that the whole schema does not name are a fault where it is flat and names some. It passes patterns,
    formats, unevaluated properties and items, and references out of the schema. Not `jsonschema`: a schema's patterns
    come from outside, and there they would run in Python's `re`, without a limit.
    """
    return _Check(schema).fault(value, schema)


def is_flat(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema names the properties of its objects in `properties` alone."""
    return OPENS.isdisjoint(schema)


class _Check:
    """A check of a value against one schema, which references are of. Each part is asked once for each place."""

    def __init__(self, root: Any):
        self._root = root
        self._faults: dict[tuple[int, str], str] = {}

    def fault(self, value: Any, schema: Any, path: str = "", depth: int = 0) -> str:
        key = id(schema), path
        if key not in self._faults:
            self._faults[key] = ""  # where a schema needs itself for the same place
            self._faults[key] = self._fault(value, schema, path, depth)
        return self._faults[key]

    def _fault(self, value: Any, schema: Any, path: str, depth: int) -> str:
        where = path or "the arguments"
        if schema is False:
            return f"{where}: nothing is allowed here, not {_short(value)}"
        if depth > MAX_DEPTH or not isinstance(schema, Mapping):
            return ""
        if schema.get("nullable") is True and value is None:
            return ""
        kinds = schema.get("type")
        listed = [kinds] if isinstance(kinds, str) else [each for each in kinds or () if each in TYPES]
        if listed and not any(TYPES.get(each, lambda _: True)(value) for each in listed):
            return f"{where}: must be {' or '.join(listed)}, not {_short(value)}"
        if "const" in schema and not _same(value, schema["const"]):
            return f"{where}: must be {_short(schema['const'])}, not {_short(value)}"
        if isinstance(schema.get("enum"), list) and not any(_same(value, each) for each in schema["enum"]):
            hint = nearest(value, [e for e in schema["enum"] if isinstance(e, str)]) if isinstance(value, str) else ""
            return f"{where}: must be one of {', '.join(map(_short, schema['enum'][:20]))}, not {_short(value)}{hint}"
        if fault := self._of_branches(value, schema, path, depth + 1):
            return fault
        if isinstance(value, dict):
            return self._of_object(value, schema, path, depth + 1)
        if isinstance(value, list):
            return self._of_list(value, schema, path, depth + 1)
        return _bound_fault(value, schema, where)

    def _of_branches(self, value: Any, schema: Mapping[str, Any], path: str, depth: int) -> str:
        where = path or "the arguments"
        for key in ("anyOf", "oneOf"):
            faults = [self.fault(value, each, path, depth) for each in _list(schema, key)]
            if faults and all(faults):
                return faults[0] if len(faults) == 1 else f"{where}: is none of {len(faults)} kinds ({faults[0]})"
            if key == "oneOf" and faults.count("") > 1:
                return f"{where}: is of {faults.count('')} kinds of oneOf, and must be of one"
        for each in (*_list(schema, "allOf"), self._referred(schema.get("$ref"))):
            if fault := self.fault(value, each, path, depth):
                return fault
        if "not" in schema and not self.fault(value, schema["not"], path, depth):
            return f"{where}: is what not {_short(schema['not'])} forbids"
        if "if" in schema:
            branch = "else" if self.fault(value, schema["if"], path, depth) else "then"
            return self.fault(value, schema.get(branch), path, depth)
        return ""

    def _referred(self, reference: object) -> Any:
        """Return the schema that a reference names; None for one that is not within the whole schema."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found = self._root
        for name in unquote(reference).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping) and name in found:
                found = found[name]
            else:
                return None
        return found

    def _of_object(self, value: dict[str, Any], schema: Mapping[str, Any], path: str, depth: int) -> str:
        known = _mapping(schema, "properties")
        where = path or "the arguments"
        is_closed = schema is self._root and bool(known) and is_flat(schema)
        needed = {name: "" for name in _list(schema, "required")}
        for name, each in (*_mapping(schema, "dependencies").items(), *_mapping(schema, "dependentRequired").items()):
            needed |= dict.fromkeys(each, f", which {name!r} needs") if isinstance(each, list) and name in value else {}
        if missing := [name for name in needed if name not in value]:
            return f"{where}: {missing[0]!r} is missing{needed[missing[0]]}"
        if fault := _count_fault(len(value), schema, "Properties", where):
            return fault
        for name, each in value.items():
            below, place = known.get(name), f"{path}.{name}" if path else name
            if name not in known and not schema.get("patternProperties"):
                below = schema.get("additionalProperties", not is_closed)
                if below is False:
                    hint = nearest(name, known) or f"; known: {', '.join(known) or 'none'}"
                    return f"{where}: {name!r} is unknown{hint}"
            if fault := self.fault(each, below, place, depth):
                return fault
            if fault := self.fault(name, schema.get("propertyNames"), f"the name of {place}", depth):
                return fault
        for name, each in (*_mapping(schema, "dependencies").items(), *_mapping(schema, "dependentSchemas").items()):
            if name in value and (fault := self.fault(value, each, path, depth)):
                return fault
        return ""

    def _of_list(self, value: list[Any], schema: Mapping[str, Any], path: str, depth: int) -> str:
        where = path or "the arguments"
        if fault := _count_fault(len(value), schema, "Items", where):
            return fault
        if schema.get("uniqueItems") is True:
            for number, each in enumerate(value):
                if any(_same(each, other) for other in value[:number]):
                    return f"{path}[{number}]: {_short(each)} is there twice, and uniqueItems forbids it"
        first, rest = _list(schema, "prefixItems"), schema.get("items")
        if isinstance(rest, list):  # before 2020-12
            first, rest = rest, schema.get("additionalItems")
        for number, each in enumerate(value):
            below = first[number] if number < len(first) else rest
            if fault := self.fault(each, below, f"{path}[{number}]", depth):
                return fault
        if "contains" in schema:
            faults = (self.fault(each, schema["contains"], f"{path}[{n}]", depth) for n, each in enumerate(value))
            count = sum(not each for each in faults)
            least, most = schema.get("minContains", 1), schema.get("maxContains", count)
            if not least <= count <= most:
                return f"{where}: has {count} items as contains wants them, and must have {least} to {most}"
        return ""


def _mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return value if isinstance(value := schema.get(key), Mapping) else {}


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    return value if isinstance(value := schema.get(key), list) else []


def _count_fault(count: int, schema: Mapping[str, Any], of: str, where: str) -> str:
    least, most = schema.get(f"min{of}"), schema.get(f"max{of}")
    if (least is not None and count < least) or (most is not None and count > most):
        what = "characters" if of == "Length" else of.lower()
        return f"{where}: must have {least or 0} to {most or 'any number of'} {what}, not {count}"
    return ""


def _bound_fault(value: Any, schema: Mapping[str, Any], where: str) -> str:
    if isinstance(value, str):
        return _count_fault(len(value), schema, "Length", where)
    if _is_number(value):
        tests = {
            "minimum": lambda bound: value < bound, "exclusiveMinimum": lambda bound: value <= bound,
            "maximum": lambda bound: value > bound, "exclusiveMaximum": lambda bound: value >= bound,
            "multipleOf": lambda step: step > 0 and isfinite(value) and Fraction(str(value)) % Fraction(str(step)) != 0,
        }  # fmt: skip
        for key, fails in tests.items():
            if _is_number(schema.get(key)) and fails(schema[key]):
                return f"{where}: {_short(value)} breaks {key} {schema[key]}"
    return ""


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are one in JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other and isinstance(one, bool) == isinstance(other, bool)


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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
