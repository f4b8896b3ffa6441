"""Find the unsupported parts of a JSON Schema, refuse or remove them, and locate compiler errors in a schema.

constrains nothing   annotations, unknown keywords, unsupported formats (2020-12, section 6.5)
carried out          CARRIED_OUT, and OpenAPI's `nullable`
not carried out      NOT_CARRIED_OUT, look-around in a pattern, numbers that would be rounded, ...: refused by name
                     (`check_keywords`), or left out, so that every valid instance stays one (`widen`)
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from workbench.constrained.json_dates import carry_out_dates
from workbench.constrained.json_numbers import BOUNDS, COUNTS, carry_out_bounds, is_number, number_faults, with_integers
from workbench.errors import WorkbenchError
from workbench.prompt.tools import follow

CARRIED_OUT = frozenset(
    (
        "$ref", "$defs", "definitions", "type", "const", "enum", "anyOf", "allOf", "oneOf", "items", "prefixItems",
        "additionalItems", "minItems", "maxItems", "properties", "additionalProperties", "patternProperties",
        "required", "minProperties", "maxProperties", "minLength", "maxLength", "pattern", "format", "minimum",
        "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    )
)  # fmt: skip
NOT_CARRIED_OUT: dict[str, tuple[Any, ...]] = {  # constraining keywords, with those values that constrain nothing
    "not": (False,), "if": (), "uniqueItems": (False,), "contains": (), "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},), "dependentSchemas": ({},), "dependencies": ({},), "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}), "$dynamicRef": (), "$recursiveRef": (),
}  # fmt: skip
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
NULLABLE = "nullable"
SPELLINGS = {key.lower(): key for key in (*CARRIED_OUT, *NOT_CARRIED_OUT, NULLABLE)}
TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
IN_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
ALONE = ("items", "additionalItems", "additionalProperties")
MAX_PROPERTIES = 2000  # of an object: compile time grows with their square, 0.6 s for 2000
MAX_SEARCHED = 2000  # maximum subschemas compiled alone to locate an error

WHERE = "response_format.json_schema"
Step = str | int
Path = tuple[Step, ...]


def check_keywords(schema: Any) -> None:
    """Raise WorkbenchError, with the path, for the first part of a schema that is not supported: a keyword, a number,
    or a reference without a target.
    """
    places = {path for path, _ in subschemas(schema)}
    for path, each in subschemas(schema):
        for _, words in _faults(schema, each, path, places):
            raise WorkbenchError(words)


def widen(schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of a schema without its unsupported parts, and messages with the paths of the removed parts.

    The copy admits every instance of the schema, and possibly more. A `oneOf` becomes an `anyOf`; a value that is not a
    schema becomes one that admits everything.
    """
    schema = copy.deepcopy(schema)
    places, left = {path for path, _ in subschemas(schema)}, []
    for path, each in subschemas(schema):
        if isinstance(each, bool):
            continue
        if not isinstance(each, dict):
            left += [words for _, words in _faults(schema, each, path, places)]
            _at(schema, path[:-1])[path[-1]] = {}
            continue
        where = describe_path(path)
        for key in [key for key, value in each.items() if not _is_shaped(key, value)]:
            left.append(f"{where}.{key}: {str(each.pop(key))[:60]!r} is not a valid value")
        for keys, words in list(_faults(schema, each, path, places)):
            left.append(words)
            for key in keys:
                each.pop(key, None)
        if not _is_read(each.get("pattern", "")):
            left.append(f"{where}: the pattern {each.pop('pattern')[:60]!r} is not supported")
        patterns = each.get("patternProperties", ())
        if len(patterns) > 1 or not all(map(_is_read, patterns)):
            left.append(f"{where}: patternProperties {', '.join(patterns)[:60]!r} are not supported")
            for key in ("patternProperties", "additionalProperties"):
                each.pop(key, None)
        counts = {"minProperties", "maxProperties"} & each.keys()
        if counts and not {*each.get("properties", ())} <= {*each.get("required", ())}:
            left.append(f"{where}: {', '.join(sorted(counts))}: not supported unless all properties are required")
            for key in counts:
                del each[key]
        if "oneOf" in each:
            choice = {"anyOf": each.pop("oneOf")}
            each.update({"allOf": [*each.get("allOf", ()), choice]} if "anyOf" in each else choice)
    return schema, left


@lru_cache(4096)
def _is_read(pattern: str) -> bool:
    """Return whether the compiler supports a pattern: no look-around, no backreferences, no JavaScript-specific syntax.
    """
    schema = json.dumps({"type": "string", "pattern": pattern})
    return not pattern or not LLMatcher.validate_grammar(f"start: %json {schema}")


def _is_shaped(key: str, value: Any) -> bool:
    """Return whether a supported keyword has a value of the type that JSON Schema requires; subschemas are not checked.
    """
    if key == "type":
        return all(each in TYPES for each in (value if isinstance(value, list) else [value]))
    if key in BY_NAME:
        return isinstance(value, dict)
    if key in (*IN_LISTS, "enum"):
        return isinstance(value, list)
    if key == "required":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if key in ("pattern", "format"):
        return isinstance(value, str)
    if key in COUNTS or key.replace("min", "max") in COUNTS:
        return is_number(value) and value >= 0 and value == int(value)
    return key not in (*BOUNDS, "multipleOf") or (is_number(value) and (key != "multipleOf" or value > 0))


def _faults(schema: Any, each: Any, path: Path, places: Collection[Path]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the unsupported parts of one subschema: the keywords to remove (none if it is not a schema), and a message
    with the path.
    """
    where = describe_path(path)
    if isinstance(each, bool):
        return
    if not isinstance(each, dict):
        yield (), f"{where}: a schema must be an object or a boolean, not {type(each).__name__}"
        return
    for key, value in each.items():
        usual = SPELLINGS.get(key.lower())
        if usual is not None and key != usual:
            yield (key,), f"{where}: the keyword {key!r} is unknown; did you mean {usual!r}?"
        elif key in NOT_CARRIED_OUT and value not in NOT_CARRIED_OUT[key]:
            yield (key,), f"{where}: the keyword {key!r} is not supported; leave it out"
    for key in BY_NAME[:2]:
        if isinstance(each.get(key), dict) and len(each[key]) > MAX_PROPERTIES:
            words = f"{where}.{key}: {len(each[key])} entries; at most {MAX_PROPERTIES}"
            yield (*BY_NAME[:2], "additionalProperties"), words
    required, needed = each.get("required", []), each.get("minProperties", 0)
    if not isinstance(required, list):
        yield ("required",), f"{where}.required: must be a list of names, not {str(required)[:60]}"
    elif isinstance(needed, int) and needed > len(required):
        # A repeated name counts once.
        words = f"{where}: minProperties {needed} is not supported beyond the required properties; require them"
        yield ("minProperties",), words
    for key, words in number_faults(each, where):
        yield (key,), words
    if "$ref" in each:
        if any("$id" in _at(schema, path[:length]) for length in range(1, len(path) + 1)):
            yield ("$ref",), f"{where}: $ref within a schema with its own $id: $id is supported only at the top level"
            return
        try:
            _check_reference(schema, each["$ref"], where, places)
        except WorkbenchError as error:
            yield ("$ref",), str(error)


def _at(schema: Any, path: Path) -> Any:
    for step in path:
        schema = schema[step]
    return schema


def _check_reference(schema: Any, reference: object, where: str, places: Collection[Path]) -> None:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise WorkbenchError(f"{where}: $ref {reference!r}: only references within this schema, as '#/$defs/name'")
    _, path, missing = follow(schema, reference)
    if missing:
        raise WorkbenchError(f"{where}: $ref {reference!r}: there is no {missing!r}")
    if path not in places:  # its keywords and numbers were not checked
        raise WorkbenchError(f"{where}: $ref {reference!r}: points to a value, not a schema; put a schema under $defs")


def carried_out(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema that has only the parts that the compiler supports. Call `check_keywords` or `widen`
    before it: they refuse or remove unsupported parts that constrain an answer.
    """
    schema = with_integers(schema)
    for _, each in subschemas(schema):
        if isinstance(each, dict):
            carry_out_bounds(each)
            if each.pop(NULLABLE, None) is True:
                _admit_null(each)
            for key in [key for key in each if key not in CARRIED_OUT]:
                del each[key]
            if each.get("format") not in FORMATS:
                each.pop("format", None)
            carry_out_dates(each)
    return schema


def _admit_null(schema: dict[str, Any]) -> None:
    """Let one subschema also admit null. A subschema with references, branches or `const` moves into an `anyOf`, next
    to its definitions.
    """
    if any(key in schema for key in ("$ref", "allOf", "anyOf", "oneOf", "const")):
        kept = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        inner = {key: value for key, value in schema.items() if key not in kept}
        schema.clear()
        schema.update({**kept, "anyOf": [inner, {"type": "null"}]})
        return
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        schema["type"] = [*kinds, *(["null"] if "null" not in kinds else [])]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]


def subschemas(schema: Any) -> Iterator[tuple[Path, Any]]:
    """Yield (path, subschema) for a schema and all schemas within it, in their order, outer ones first."""
    stack: list[tuple[Path, Any]] = [((), schema)]
    while stack:
        path, each = stack.pop()
        yield path, each
        if not isinstance(each, dict):
            continue
        inner: list[tuple[Path, Any]] = []
        for key, value in each.items():
            if key in BY_NAME and isinstance(value, dict):
                inner += [((*path, key, name), below) for name, below in value.items()]
            elif (key in IN_LISTS or key == "items") and isinstance(value, list):
                inner += [((*path, key, index), below) for index, below in enumerate(value)]
            elif key in ALONE:
                inner.append(((*path, key), value))
        stack += reversed(inner)


def describe_path(path: Path) -> str:
    """Return a path as text, such as `response_format.json_schema.properties.age.anyOf[1]`."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return WHERE + "".join(steps)


def locate_fault(schema: Any, error: str, compile_error: Callable[[Any], str]) -> Path:
    """Return the path of the innermost subschema that fails alone with the same error as the whole schema.

    Args:
        schema: the schema.
        error: the compiler's message for the whole schema.
        compile_error: compiles a schema and returns the error message, or an empty string.
    """
    inner: Path = ()
    for number, (path, _) in enumerate(subschemas(schema)):
        if number > MAX_SEARCHED:
            break
        # The path of an error extends the path of the enclosing schema: other branches are skipped.
        if path[: len(inner)] == inner and len(path) > len(inner) and compile_error(_alone(schema, path)) == error:
            inner = path
    return inner


def name_keyword(schema: Any, path: Path, words: str) -> str:
    """Return the compiler's message about the subschema at a path, with the keyword concerned."""
    each = _at(schema, path)
    if words.startswith("oneOf "):
        return (
            "the keyword 'oneOf' is not supported where its branches overlap; tell them apart by a type or a const, "
            "or use anyOf"
        )
    if "regex" in words and isinstance(each, dict):
        for key in ("pattern", "patternProperties"):
            patterns = each.get(key, ())
            for pattern in (patterns,) if isinstance(patterns, str) else patterns:
                if not _is_read(pattern):
                    reason = words.rpartition("error: ")[2]
                    return f"the keyword {key!r} is not supported as {pattern[:60]!r}: {reason}"
    return words


def _alone(schema: Any, path: Path) -> Any:
    """Return the subschema at `path` as a schema in which references still resolve."""
    pointer = "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)
    return within(schema, {"$ref": f"#{pointer}"})


def within(schema: Any, part: dict[str, Any]) -> dict[str, Any]:
    """Return the subschema `part` of a schema as a schema of its own, in which references still resolve."""
    return {**_moved(part), "$defs": {"whole": _moved(schema)}} if '"$ref"' in json.dumps(part) else part


def _moved(value: Any) -> Any:
    if isinstance(value, list):
        return [_moved(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: "#/$defs/whole" + each[1:] if key == "$ref" and isinstance(each, str) else _moved(each)
        for key, each in value.items()
    }
