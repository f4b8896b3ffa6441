"""Draw JSON schemas of many kinds from a seed: objects, arrays, numbers, strings, formats, unions, references.

`python -m experiments.random_schemas MODEL` counts how many greedy answers of a model end by themselves within 64
tokens, for schemas with closed objects and with open ones. Answers that do not are closed in time for the limit.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import Any

from workbench import load
from workbench.engine.runner import Runner
from workbench.prompt.conversation import Conversation
from workbench.request import Request, SamplingParameters
from workbench.response_format import JSONSchema
from workbench.trace.events import Finished

QUESTION = "Write an example of a record as JSON."
BATCH = 20  # schemas, each of them closed and open

Schema = dict[str, Any]
WORDS = (
    "name", "age", "city", "tags", "score", "items", "price", "notes", "kind", "size", "owner", "path", "color",
    "a b", "née", "x\"y", "id", "parts", "next", "when",
)  # fmt: skip
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "hostname", "uri")
PATTERNS = (r"^[A-Z]{2}-\d{3,5}$", r"^(red|green|blue)$", r"^[a-z]+(_[a-z]+)*$", r"\d", r"^\S{4,9}$")


def draw_schema(seed: int) -> tuple[str, Schema]:
    """Return the kind of schema number `seed`, and the schema itself."""
    draw = random.Random(seed)
    kind = sorted(KINDS)[seed % len(KINDS)]
    return kind, KINDS[kind](draw, 3)


def _any(draw: random.Random, depth: int) -> Schema:
    simple = [_boolean, _integer, _number, _string, _enum, _pattern]
    return draw.choice(simple if depth <= 0 else [*simple, _object, _object, _array, _union])(draw, depth - 1)


def _boolean(draw: random.Random, depth: int) -> Schema:
    return {"type": draw.choice(["boolean", "null", ["boolean", "null"]])}


def _integer(draw: random.Random, depth: int) -> Schema:
    low = draw.randint(-1000, 1000)
    bounds = [{}, {"minimum": low}, {"minimum": low, "maximum": low + draw.randint(0, 500)}, {"exclusiveMaximum": low}]
    return {"type": "integer", **draw.choice([*bounds, {"multipleOf": draw.choice([2, 5, 7]), "minimum": 0}])}


def _number(draw: random.Random, depth: int) -> Schema:
    low = round(draw.uniform(-100, 100), 2)
    bounds = [{}, {"minimum": low}, {"minimum": low, "maximum": low + 10}, {"exclusiveMinimum": 0}]
    return {"type": "number", **draw.choice(bounds)}


def _string(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 6)
    return {"type": "string", **draw.choice([{}, {"minLength": least}, {"minLength": least, "maxLength": least + 9}])}


def _pattern(draw: random.Random, depth: int) -> Schema:
    return {"type": "string", **draw.choice([{"pattern": draw.choice(PATTERNS)}, {"format": draw.choice(FORMATS)}])}


def _enum(draw: random.Random, depth: int) -> Schema:
    values: list[Any] = [
        "red",
        "green",
        "a longer value",
        'with "quotes"',
        "née",
        3,
        -1.5,
        True,
        None,
        [1, 2],
        {"k": 1},
    ]
    return draw.choice([{"enum": draw.sample(values, draw.randint(1, 5))}, {"const": draw.choice(values)}])


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 3)
    bounds = draw.choice([{}, {"minItems": least}, {"minItems": least, "maxItems": least + draw.randint(0, 3)}])
    if draw.random() < 0.25:
        first = [_any(draw, depth - 1) for _ in range(draw.randint(1, 3))]
        return {"type": "array", "prefixItems": first, "items": draw.choice([False, {"type": "integer"}])}
    return {"type": "array", "items": _any(draw, depth - 1), **bounds}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(WORDS, draw.randint(1, 5))
    properties = {name: _any(draw, depth - 1) for name in names}
    required = [name for name in names if draw.random() < 0.6]
    others = draw.choice([{}, {"additionalProperties": False}, {"additionalProperties": {"type": "integer"}}])
    return {"type": "object", "properties": properties, "required": required, **others}


def _union(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(draw, depth - 1) for _ in range(draw.randint(2, 3))]}


def _all_of(draw: random.Random, depth: int) -> Schema:
    first, second = ({"type": "object", "properties": {name: _any(draw, 1)}, "required": [name]}
                     for name in draw.sample(WORDS, 2))  # fmt: skip
    return {"allOf": [first, second]}


def _tagged(draw: random.Random, depth: int) -> Schema:
    """Return a union by a constant, which exactly one member has."""
    names = draw.sample(WORDS, 3)
    members = [
        {"type": "object", "properties": {"tag": {"const": name}, name: _any(draw, 1)}, "required": ["tag", name]}
        for name in names
    ]
    return {"oneOf": members}


def _map(draw: random.Random, depth: int) -> Schema:
    if draw.random() < 0.5:
        return {"type": "object", "additionalProperties": _any(draw, 1)}
    return {"type": "object", "patternProperties": {"^[a-z]{1,4}$": _any(draw, 1)}, "additionalProperties": False}


def _tree(draw: random.Random, depth: int) -> Schema:
    node = {
        "type": "object",
        "properties": {"value": _any(draw, 1), "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
        "required": draw.choice([["value"], ["value", "children"]]),
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _list(draw: random.Random, depth: int) -> Schema:
    """Return a linked list: each cell ends, or holds the next."""
    cell = {
        "type": "object",
        "properties": {"head": _any(draw, 1), "tail": {"anyOf": [{"$ref": "#/definitions/cell"}, {"type": "null"}]}},
        "required": ["head", "tail"],
        "additionalProperties": False,
    }
    return {"$ref": "#/definitions/cell", "definitions": {"cell": cell}}


KINDS = {
    "allOf": _all_of, "array": _array, "enum": _enum, "linked list": _list, "map": _map, "number": _number,
    "integer": _integer, "object": _object, "string": _string, "pattern or format": _pattern, "tagged union": _tagged,
    "tree": _tree, "union": _union,
}  # fmt: skip


def with_objects(schema: Any, closed: bool) -> Any:
    """Return a schema whose objects with named properties allow no other properties if `closed`, else any."""
    if isinstance(schema, list):
        return [with_objects(each, closed) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: with_objects(each, closed) for name, each in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        found.pop("additionalProperties", None)
        found |= {"additionalProperties": False} if closed else {}
    return found


def count_ends(runner: Runner, schemas: int, max_tokens: int) -> dict[str, Counter[str]]:
    """Return how many answers ended in each way (stop: by themselves, length, refused), for closed and for open
    objects."""
    ids = Conversation(turns=[QUESTION]).prompt(runner).ids
    found = {"closed": Counter[str](), "open": Counter[str]()}
    for first in range(0, schemas, BATCH):
        requests: list[Request] = []
        for seed in range(first, min(first + BATCH, schemas)):
            for name in found:
                form = JSONSchema(json_schema=with_objects(draw_schema(seed)[1], name == "closed"))
                sampling = SamplingParameters(response_format=form, max_tokens=max_tokens, temperature=0)
                requests.append(Request(f"{name} {seed}", ids, sampling))
        for event in runner.stream(requests):
            if isinstance(event, Finished):
                found[event.request_id.split()[0]].update([event.reason, "answers"])
    return found


if __name__ == "__main__":
    print(count_ends(load(sys.argv[1], prefix="radix"), schemas=100, max_tokens=64))
