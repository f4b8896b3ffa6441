"""Validate the arguments of a call against the tool's schema, and convert them by its function's type hints."""

from __future__ import annotations

import enum
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from workbench.errors import WorkbenchError, nearest
from workbench.prompt.tools import follow

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
OPENS = frozenset(  # keywords besides `properties` that allow further properties
    ("additionalProperties", "patternProperties", "anyOf", "allOf", "oneOf", "$ref", "if", "dependentSchemas",
     "dependencies")
)  # fmt: skip
PASSED = re.compile(  # keywords that are not checked: a value may violate them
    r'"(pattern|format|patternProperties|unevaluatedProperties|unevaluatedItems|content\w+|\$dynamicRef|multipleOf)":'
)


def find_fault(value: Any, schema: Any) -> str:
    """Return a value's first fault under a schema, with its path; empty if there is none.

    Unknown arguments are a fault if the schema is flat and names arguments. Patterns, formats, unevaluated properties
    and items, and references out of the schema are not checked. It does not use `jsonschema`, which would run patterns
    from outside in Python's `re` without a limit.
    """
    return _Check(schema).fault(value, schema, "", 0)


def is_flat(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema names the properties of its objects only in `properties`."""
    return OPENS.isdisjoint(schema)


class _Check:
    """A check of a value against one schema, which also resolves references. Each part is checked once per place."""

    def __init__(self, root: Any):
        self._root, self._known = root, dict[tuple[int, str], str]()
        self._sure = dict[int, bool]()

    def holds(self, value: Any, schema: Any, path: str, depth: int) -> bool | None:
        """Return whether a value satisfies a schema; None if no fault was found but some keywords are not checked."""
        if self.fault(value, schema, path, depth):
            return False
        if id(schema) not in self._sure:
            text = json.dumps(schema)
            words = json.dumps(self._root) if '"$ref":' in text else text
            self._sure[id(schema)] = PASSED.search(words) is None
        return True if self._sure[id(schema)] else None

    def fault(self, value: Any, schema: Any, path: str, depth: int) -> str:
        key = id(schema), path
        if key not in self._known:
            self._known[key] = ""  # a schema that refers to itself at the same place
            self._known[key] = next(filter(None, self._faults(value, schema, path, depth + 1)), "")
        return self._known[key]

    def _faults(self, value: Any, schema: Any, path: str, depth: int) -> Iterator[str]:
        """Yield faults, or empty texts for passed checks."""
        where = path or "the arguments"
        if schema is False:
            yield f"{where}: no value is allowed here, not {_short(value)}"
        if depth > MAX_DEPTH or not isinstance(schema, Mapping) or (schema.get("nullable") is True and value is None):
            return
        kinds = schema.get("type")
        listed = [str(each) for each in (kinds if isinstance(kinds, list) else [kinds])]  # unknown types admit all
        if listed and not any(TYPES.get(each, lambda _: True)(value) for each in listed):
            yield f"{where}: must be {' or '.join(listed)}, not {_short(value)}"
        if "const" in schema and not _same(value, schema["const"]):
            yield f"{where}: must be {_short(schema['const'])}, not {_short(value)}"
        if (choices := _list(schema, "enum")) and not any(_same(value, each) for each in choices):
            hint = nearest(value, [e for e in choices if isinstance(e, str)]) if isinstance(value, str) else ""
            yield f"{where}: must be one of {', '.join(map(_short, choices[:20]))}, not {_short(value)}{hint}"
        for key in ("anyOf", "oneOf"):
            faults = [self.fault(value, each, path, depth) for each in _list(schema, key)]
            if faults and all(faults):
                yield faults[0] if len(faults) == 1 else f"{where}: matches no alternative ({faults[0]})"
            if key == "oneOf" and faults.count("") > 1:
                count = [self.holds(value, each, path, depth) for each in _list(schema, key)].count(True)
                yield f"{where}: matches {count} alternatives of oneOf, and must match one" if count > 1 else ""
        for each in (*_list(schema, "allOf"), self._referred(schema.get("$ref"))):
            yield self.fault(value, each, path, depth)
        if "not" in schema and self.holds(value, schema["not"], path, depth):
            yield f"{where}: matches {_short(schema['not'])}, which `not` forbids"
        if "if" in schema and (holds := self.holds(value, schema["if"], path, depth)) is not None:
            yield self.fault(value, schema.get("then" if holds else "else"), path, depth)
        if isinstance(value, dict):
            yield from self._of_object(value, schema, path, depth)
        elif isinstance(value, list):
            yield from self._of_list(value, schema, path, depth)
        else:
            yield from _of_scalar(value, schema, where)

    def _referred(self, reference: object) -> Any:
        """Return the schema that a reference names; None for a reference out of the whole schema."""
        return follow(self._root, reference)[0] if isinstance(reference, str) else None

    def _of_object(self, value: dict[str, Any], schema: Mapping[str, Any], path: str, depth: int) -> Iterator[str]:
        known, where = _mapping(schema, "properties"), path or "the arguments"
        needed = {name: "" for name in _list(schema, "required") if isinstance(name, str)}
        for name, each in (*_mapping(schema, "dependentRequired").items(), *_mapping(schema, "dependencies").items()):
            needed |= dict.fromkeys(each, f", which {name!r} needs") if isinstance(each, list) and name in value else {}
        yield from (f"{where}: {name!r} is missing{why}" for name, why in needed.items() if name not in value)
        yield _count_fault(len(value), schema, "Properties", where)
        is_closed = schema is self._root and bool(known) and is_flat(schema)
        for name, each in value.items():
            below, place = known.get(name), f"{path}.{name}" if path else name
            if name not in known and not schema.get("patternProperties"):
                below = schema.get("additionalProperties", not is_closed)
                if below is False:
                    hint = nearest(name, known) or f"; known: {', '.join(known) or 'none'}"
                    yield f"{where}: {name!r} is unknown{hint}"
            yield self.fault(each, below, place, depth)
            yield self.fault(name, schema.get("propertyNames"), f"the name of {place}", depth)
        for name, each in (*_mapping(schema, "dependentSchemas").items(), *_mapping(schema, "dependencies").items()):
            yield self.fault(value, each, path, depth) if name in value else ""

    def _of_list(self, value: list[Any], schema: Mapping[str, Any], path: str, depth: int) -> Iterator[str]:
        where = path or "the arguments"
        yield _count_fault(len(value), schema, "Items", where)
        first, rest = _list(schema, "prefixItems"), schema.get("items")
        if isinstance(rest, list):  # before 2020-12
            first, rest = rest, schema.get("additionalItems")
        for number, each in enumerate(value):
            if schema.get("uniqueItems") is True and any(_same(each, other) for other in value[:number]):
                yield f"{path}[{number}]: {_short(each)} occurs twice, and uniqueItems forbids it"
            yield self.fault(each, first[number] if number < len(first) else rest, f"{path}[{number}]", depth)
        if "contains" in schema:
            found = [self.holds(each, schema["contains"], f"{path}[{n}]", depth) for n, each in enumerate(value)]
            least, most = _number(schema, "minContains", 1), _number(schema, "maxContains", len(value))
            if len(found) - found.count(False) < least or found.count(True) > most:
                yield f"{where}: {found.count(True)} items match contains, and {least} to {most} must"


def _mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return value if isinstance(value := schema.get(key), Mapping) else {}


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    return value if isinstance(value := schema.get(key), list) else []


def _number(schema: Mapping[str, Any], key: str, default: Any = None) -> Any:
    return value if _is_number(value := schema.get(key)) else default


def _count_fault(count: int, schema: Mapping[str, Any], of: str, where: str) -> str:
    least, most = _number(schema, f"min{of}"), _number(schema, f"max{of}")
    if (least is None or count >= least) and (most is None or count <= most):
        return ""
    what = "characters" if of == "Length" else of.lower()
    return f"{where}: must have {least or 0} to {'any number of' if most is None else most} {what}, not {count}"


def _of_scalar(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    if isinstance(value, str):
        yield _count_fault(len(value), schema, "Length", where)
    if _is_number(value):
        tests = {
            "minimum": lambda bound: value < bound, "exclusiveMinimum": lambda bound: value <= bound,
            "maximum": lambda bound: value > bound, "exclusiveMaximum": lambda bound: value >= bound,
        }  # fmt: skip
        for key, fails in tests.items():
            if _is_number(schema.get(key)) and fails(schema[key]):
                yield f"{where}: {_short(value)} violates {key} {schema[key]}"


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def convert_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments converted by a function's type hints: members of an Enum, sets, tuples, pydantic models.

    Plain JSON types stay unchanged: no integer becomes a float.

    Raises:
        WorkbenchError: if an argument cannot be converted.
    """
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # a callable without readable hints takes all values that the schema allows
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
