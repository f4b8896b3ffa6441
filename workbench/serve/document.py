"""Describe the routes in OpenAPI: their bodies, and the shapes of their answers and errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

    from workbench.serve.bodies.fields import Body

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
OBJECT: Schema = {"type": "object"}
REFERENCE = "#/components/schemas/{model}"


def object_schema(optional: Mapping[str, Schema] | None = None, **fields: Schema) -> Schema:
    """Return the schema of an object with required `fields`, `optional` fields, and any others."""
    return {"type": "object", "required": sorted(fields), "properties": {**fields, **(optional or {})}}


def list_schema(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def describe_body(kind: type[Body]) -> Schema:
    """Return the part of an OpenAPI operation that describes its body; `build_document` moves the definitions to their
    place.
    """
    schema = kind.model_json_schema(ref_template=REFERENCE)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe_responses(answer: Schema, errors: Iterable[Schema], streams: bool = False) -> dict[int | str, Schema]:
    """Return the part of an OpenAPI operation that describes its responses: the answer, also as a stream of events, and
    every error.
    """
    kinds: list[Schema] = []
    for each in errors:
        if each not in kinds:
            kinds.append(each)
    error = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    content: Schema = {"application/json": {"schema": answer}}
    if streams:
        # Not a string: readers of the document validate each event, an object, against the schema.
        content["text/event-stream"] = {"schema": {"description": "the protocol's events, one after another"}}
    found: dict[int | str, Schema] = {200: {"description": "the answer", "content": content}}
    for statuses in ("4XX", "5XX"):
        content = {"application/json": {"schema": error}}
        found[statuses] = {"description": "an error in the protocol's shape", "content": content}
    return found


def build_document(app: FastAPI) -> Schema:
    """Return the OpenAPI document of an application with bodies described by `describe_body`."""
    found = app.openapi()
    shared = found.setdefault("components", {}).setdefault("schemas", {})
    for operations in found["paths"].values():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                shared.update(content["schema"].pop("$defs", {}))
    return found
