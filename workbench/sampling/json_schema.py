"""Check that every keyword of a JSON Schema is carried out, and find the path of a fault that the compiler reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any
from urllib.parse import unquote

from workbench.errors import WorkbenchError
from workbench.sampling.json_dates import carry_out_dates
from workbench.sampling.json_numbers import carry_out_bounds, check_numbers, with_integers

ANNOTATIONS = frozenset(
    (
        "$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly",
        "writeOnly",
    )
)  # fmt: skip
CARRIED_OUT = frozenset(
    (
        "$ref", "$defs", "definitions", "type", "const", "enum", "anyOf", "allOf", "oneOf", "items", "prefixItems",
        "additionalItems", "minItems", "maxItems", "properties", "additionalProperties", "patternProperties",
        "required", "minProperties", "maxProperties", "minLength", "maxLength", "pattern", "format", "minimum",
        "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    )
)  # fmt: skip
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
IN_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
ALONE = ("items", "additionalItems", "additionalProperties")
MAX_PROPERTIES = 2000  # of an object: the compiler's time goes with their square, 0.6 s for these
MAX_SEARCHED = 2000  # subschemas that are compiled alone to find a fault's path

Step = str | int
Path = tuple[Step, ...]


def check_keywords(schema: Any) -> None:
    """Refuse the first keyword or number that is not carried out, and the first reference without a target, with the
    path."""
    places = {path for path, _ in subschemas(schema)}
    for path, each in subschemas(schema):
        where = describe_path(path)
        if isinstance(each, bool):
            continue
        if not isinstance(each, dict):
            raise WorkbenchError(f"{where}: a schema is an object or a boolean, not {type(each).__name__}")
        unknown = [key for key in each if key not in CARRIED_OUT and key not in ANNOTATIONS]
        if unknown:
            raise WorkbenchError(f"{where}: the keyword {unknown[0]!r} is not carried out; leave it out")
        for key in BY_NAME[:2]:
            if isinstance(each.get(key), dict) and len(each[key]) > MAX_PROPERTIES:
                raise WorkbenchError(f"{where}.{key}: {len(each[key])} of them; {MAX_PROPERTIES} at most")
        if path and "$id" in each:
            raise WorkbenchError(f"{where}: $id is carried out at the top alone")
        needed = each.get("minProperties", 0)
        if isinstance(needed, int) and needed > len(each.get("required", ())):
            raise WorkbenchError(  # a name may come twice, and counts once
                f"{where}: minProperties {needed} is not carried out beyond the required properties; require them"
            )
        check_numbers(each, where)
        if "$ref" in each:
            _check_reference(schema, each["$ref"], where, places)


def _check_reference(schema: Any, reference: object, where: str, places: Collection[Path]) -> None:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise WorkbenchError(f"{where}: $ref {reference!r}: only references within this schema, as '#/$defs/name'")
    _, path, missing = follow(schema, reference)
    if missing:
        raise WorkbenchError(f"{where}: $ref {reference!r}: there is no {missing!r}")
    if path not in places:  # its keywords and numbers were not looked at
        raise WorkbenchError(f"{where}: $ref {reference!r}: there is no schema, but a value; put one under $defs")


def follow(schema: Any, reference: str) -> tuple[Any, Path, str]:
    """Return what a reference within a schema names, its path, and the step that there is none of, if so."""
    found, path = schema, ()
    for name in reference.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found, path = found[name], (*path, name)
        elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found, path = found[int(name)], (*path, int(name))
        else:
            return None, path, name
    return found, path, ""


def carried_out(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema with numbers and dates as the compiler carries them out; `check_keywords` refuses
    others."""
    schema = with_integers(schema)
    for _, each in subschemas(schema):
        if isinstance(each, dict):
            carry_out_bounds(each)
            carry_out_dates(each)
    return schema


def subschemas(schema: Any) -> Iterator[tuple[Path, Any]]:
    """Yield (path, subschema), outer ones first, in the schema's order."""
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
    """Return a path as in `response_format.json_schema.properties.age.anyOf[1]`."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "response_format.json_schema" + "".join(steps)


def locate_fault(schema: Any, error: str, compile_error: Callable[[Any], str]) -> Path:
    """Return the path of the innermost subschema that fails alone as the whole schema does.

    Args:
        schema: the schema.
        error: the compiler's message on the whole.
        compile_error: compiles a schema, and returns its message, or nothing.
    """
    found: Path = ()
    for number, (path, _) in enumerate(subschemas(schema)):
        if number > MAX_SEARCHED:
            break
        # A fault's path begins with that of the schema around it: other branches need not be tried.
        if path[: len(found)] == found and len(path) > len(found) and compile_error(_alone(schema, path)) == error:
            found = path
    return found


def _alone(schema: Any, path: Path) -> Any:
    """Return a schema that is the subschema at `path`; references still find their targets."""
    pointer = "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)
    return {"$ref": f"#/$defs/whole{pointer}", "$defs": {"whole": _moved(schema)}}


def _moved(value: Any) -> Any:
    if isinstance(value, list):
        return [_moved(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: "#/$defs/whole" + each[1:] if key == "$ref" and isinstance(each, str) else _moved(each)
        for key, each in value.items()
    }
