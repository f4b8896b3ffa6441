"""Tools declared from functions are those of transformers; what cannot be declared is one clear error."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import pytest

from workbench.errors import WorkbenchError
from workbench.prompt.tools import Tool, check_schema_size, declare


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


def convert(value: float, to: Unit, digits: int = 2, also: list[str] | None = None) -> float:
    """Convert a length.

    It is rounded.

    Args:
        value: the length,
            in metres
        to: the unit
        digits: after the point
        also: other units

    Returns:
        the length in the unit
    """
    return value


def search(
    words: str, where: Literal["title", "text"], most: int | None = None, by: dict[str, int | str] | None = None
) -> list[dict[str, Any]]:
    """Search documents.

    Args:
        words: what to look for
        where: the field
        most: how many
        by: weights
    """
    return []


def pair(point: tuple[int, float], plain: list, anything: Any, flag: bool) -> None:
    """Take a point.

    Args:
        point: x and y
        plain: any list
        anything: any value
        flag: yes or no
    """


@pytest.mark.parametrize("function", [convert, search, pair])
def test_declarations_are_those_of_transformers(function: Any) -> None:
    from transformers.utils import get_json_schema

    expected = get_json_schema(function)
    expected["function"].pop("return" if function is pair else "nothing", None)  # of None: there is nothing to read
    assert declare(function).declaration() == expected
    assert declare(function).function is function


def test_an_annotated_argument_brings_its_description() -> None:
    def f(x: Annotated[int, "a number"]) -> int:
        """Do it."""
        return x

    assert declare(f).parameters["properties"] == {"x": {"type": "integer", "description": "a number"}}


def test_declarations_of_several_shapes() -> None:
    schema = {"type": "object", "properties": {}}
    for given in (
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}},
        {"type": "function", "name": "f", "description": "d", "parameters": schema},
        {"name": "f", "description": "d", "input_schema": schema},
        Tool(name="f", description="d", parameters=schema),
    ):
        assert declare(given) == Tool(name="f", description="d", parameters=schema)


def test_a_declaration_is_shown_as_it_is_given() -> None:
    """The order of its keys is part of the prefix, and so is what else it says."""
    given = {"function": {"parameters": {"type": "object"}, "strict": True, "name": "f"}, "type": "function"}
    assert list(declare(given).declaration()) == ["function", "type"] and declare(given).declaration() == given
    assert declare(declare(given).model_dump()) == declare(given)


def unhinted(x):  # noqa: ANN001, ANN201 (that is the fault)
    """Do it."""


def starred(*x: int) -> None:
    """Do it."""


def foreign(x: Tool.__class__) -> None:  # type: ignore[valid-type] (that is the fault)
    """Do it."""


def unresolved(x: "Nowhere") -> None:  # type: ignore[name-defined] # noqa: F821 (that is the fault)
    """Do it."""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (unhinted, "argument 'x' has no type hint"), (starred, "cannot be given by name"),
        (foreign, "argument 'x' is a ModelMetaclass, which JSON does not have"),
        (unresolved, "type hints cannot be read"), (lambda: 1, "has no docstring"), (3, "give a function"),
        ({"function": {}}, "must have a name"), ({"name": "f", "parameters": 3}, "has no schema"),
    ],
)  # fmt: skip
def test_what_cannot_be_declared_is_named(function: Any, words: str) -> None:
    with pytest.raises(WorkbenchError) as caught:
        declare(function)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("depth", "parts", "said"), [(64, 10_000, ""), (65, 9, "64 deep"), (9, 10_001, "10,000 parts")]
)
def test_schemas_are_as_deep_and_as_large_as_said(depth: int, parts: int, said: str) -> None:
    schema: Any = 0
    for _ in range(depth - 1):
        schema = {"x": schema}
    try:
        check_schema_size([schema, *[0] * (parts - depth - 1)], "f")
    except WorkbenchError as error:
        assert said and said in str(error)
    else:
        assert not said
