"""Close the objects of a JSON Schema (`strict`), so that an answer has only declared properties."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from workbench.constrained.json_schema import IN_LISTS, subschemas
from workbench.errors import WorkbenchError
from workbench.prompt.tools import follow
from workbench.response_format import JSONSchema

JOINED = {*IN_LISTS[:3], "$ref"}  # keywords with schemas of the same instance
MAX_LOOKS = 1_000_000  # maximum visits of schemas in all groups


def answer_of(schema: dict[str, Any], strict: bool) -> JSONSchema:
    """Return the response format of JSON answers under a schema; with `strict`, objects have only declared properties
    (see `closed`).
    """
    form = JSONSchema(json_schema=schema)
    return form.model_copy(update={"json_schema": closed(schema)}) if strict else form


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy in which objects have only declared properties, unless their schema allows others explicitly.

    Schemas that apply together (`allOf`, or a `$ref` or branches next to properties) are closed together, around all
    properties that any of them declares: closed one by one, they would allow no property.
    """
    root = deepcopy(schema)
    objects = [each for _, each in subschemas(root) if isinstance(each, dict)]
    heads = [each for each in objects if "allOf" in each or len({"properties", *JOINED} & each.keys()) > 1]
    if len(heads) * len(objects) > MAX_LOOKS:
        raise WorkbenchError("response_format.json_schema: too many allOf, anyOf, oneOf, $ref; leave strict out")
    groups = {id(each): _behind(root, each) for each in heads}
    inner = {id(part) for parts in groups.values() for part in parts}
    for each in objects:
        parts = [each, *groups.get(id(each), ())]
        declared = [part["properties"] for part in parts if isinstance(part.get("properties"), dict)]
        names: dict[str, Any] = {name: {} for properties in declared for name in properties}
        is_open = any({"additionalProperties", "patternProperties"} & part.keys() for part in parts)
        if names and not is_open and id(each) not in inner:
            each["properties"] = names | each.get("properties", {})
            each["additionalProperties"] = False
    return root


def _behind(root: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas that a schema applies to the same instance, directly or through other schemas."""
    objects: dict[int, dict[str, Any]] = {}
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        values = [each[key] for key in JOINED & each.keys()]
        parts = [follow(root, value)[0] if isinstance(value, str) else value for value in values]
        parts = [part for value in parts for part in (value if isinstance(value, list) else [value])]
        new = {id(part): part for part in parts if isinstance(part, dict) and id(part) not in objects}
        waiting += new.values()
        objects |= new
    return list(objects.values())
