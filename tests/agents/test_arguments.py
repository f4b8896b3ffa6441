"""Arguments against schemas: each bound is inclusive or not as JSON Schema has it, and a fault names its path."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.agents.arguments import MAX_DEPTH, find_fault

NUMBERS = st.integers(-4, 4) | st.sampled_from([-1.5, 0.0, 2.0, 2.5])
KINDS: dict[str, Any] = {
    "string": "", "integer": 2, "number": 2.5, "boolean": True, "null": None, "array": [], "object": {},
}  # fmt: skip


@given(NUMBERS, NUMBERS)
def test_bounds_of_numbers(value: float, bound: float) -> None:
    holds = {
        "minimum": value >= bound, "exclusiveMinimum": value > bound, "maximum": value <= bound,
        "exclusiveMaximum": value < bound,
    }  # fmt: skip
    assert {key: find_fault(value, {key: bound}) == "" for key in holds} == holds


@given(st.integers(0, 3), st.none() | st.integers(0, 3), st.none() | st.integers(0, 3))
def test_lengths_of_texts_and_lists(size: int, least: int | None, most: int | None) -> None:
    holds = (least is None or size >= least) and (most is None or size <= most)
    for value, name in (("x" * size, "Length"), ([0] * size, "Items")):
        said = find_fault(value, {f"min{name}": least, f"max{name}": most})
        assert (said == "") == holds
        assert holds or f"{least or 0} to {'any number of' if most is None else most} " in said


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_jsons(kind: str) -> None:
    """A whole number is a number, and 2.0 is whole; true is no number."""
    of = {name for name, value in KINDS.items() if find_fault(value, {"type": kind}) == ""}
    assert of == {"number": {"number", "integer"}}.get(kind, {kind})
    assert find_fault(2.0, {"type": "integer"}) == "" == find_fault([2.0], {"const": [2]})
    assert find_fault(None, {"type": kind, "nullable": True}) == ""


@pytest.mark.parametrize(
    ("value", "schema", "path"),
    [
        ([1, "a", "b", 3], {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, "x[3]"),
        ([{}, {"y": [1]}], {"items": {"properties": {"y": {"items": {"type": "string"}}}}}, "x[1].y[0]"),
        (5, {"allOf": [{"minimum": 1}, {"maximum": 4}]}, "x"),
        (5, {"anyOf": [{"maximum": 4}, {"type": "string"}]}, "x"),
        (True, {"enum": [1, "a"]}, "x"), (0, {"const": False}, "x"),
        ("c", {"enum": ["a", "b"]}, "x"), (1, {"const": 2}, "x"), ("a", {"type": ["integer", "null"]}, "x"),
        ({"a": 1}, {"additionalProperties": {"type": "string"}}, "x.a"),
        ({"a": 1}, {"properties": {"b": {}}, "additionalProperties": False}, "x"), ({}, {"required": ["b"]}, "x"),
    ],
)  # fmt: skip
def test_faults_name_where_they_are(value: Any, schema: dict[str, Any], path: str) -> None:
    whole = {"type": "object", "properties": {"x": schema}}
    assert find_fault({"x": value}, whole).startswith(f"{path}: ")
    assert find_fault({"z": value}, whole).startswith("the arguments: 'z' is unknown")


@pytest.mark.parametrize(("levels", "is_seen"), [(MAX_DEPTH - 1, True), (MAX_DEPTH, False)])
def test_what_lies_deeper_than_schemas_may_is_passed(levels: int, is_seen: bool) -> None:
    value: Any = 1
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        value, schema = [value], {"items": schema}
    assert bool(find_fault(value, schema)) == is_seen
