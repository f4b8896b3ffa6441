"""Messages of errors: the path as the user wrote it, and the nearest name that would be right."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from compiled_kernels import BackendError
from workbench.errors import WorkbenchError, explain, nearest


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Tool(Part):
    path: str
    settings: dict[str, float] = {}


class Round(Part):
    kind: Literal["round"] = "round"
    round: int = 1  # a field may be called as its kind is
    radius: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"


class Square(Part):
    kind: Literal["square"] = "square"
    side: int = 1
    tool: Tool | None = None


class Whole(Part):
    name: str = ""
    tools: tuple[Tool, ...] = ()
    shape: Annotated[Round | Square, Field(discriminator="kind")] = Round()


def message_of(values: object) -> str:
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate(values)
    error = explain(caught.value, "here", Whole)
    assert isinstance(error, WorkbenchError)
    assert "\n" not in str(error)
    return str(error)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"nmae": "x"}, "here: nmae: unknown key; did you mean 'name'?"),
        ({"qqqq": "x"}, "here: qqqq: unknown key; known: name, shape, tools"),
        ({"tools": [{"path": "a"}, {"path": "a", "pth": 1}]}, "here: tools.1.pth: unknown key; did you mean 'path'?"),
        ({"shape": {"kind": "round", "raduis": 1}}, "here: shape.raduis: unknown key; did you mean 'radius'?"),
        ({"shape": {"kind": "round", "side": 1}}, "here: shape.side: unknown key; did you mean 'kind'?"),
        ({"shape": {"kind": "square", "tool": {"path": "", "pth": 1}}}, "here: shape.tool.pth: unknown key; did you"),
        ({"shape": {"kind": "squre"}}, "here: shape.kind: 'squre' is unknown; did you mean 'square'?"),
        ({"shape": {}}, "here: shape.kind: is missing; known: round, square"),
        (
            {"shape": {"kind": "round", "radius": 0}},
            "here: shape.radius: Input should be greater than or equal to 1, or 'auto' (given 0)",
        ),
        ({"shape": {"kind": "round", "round": "x"}}, "here: shape.round: Input should be a valid integer"),
        ({"tools": [{}]}, "here: tools.0.path: Field required"),
        ({"tools": [{"path": "a", "settings": {"deep": "x"}}]}, "here: tools.0.settings.deep: Input should be a valid"),
        ({"tools": ["hammer"]}, "here: tools.0: must be a group of settings (path, settings), not 'hammer'"),
        ({"shape": 3}, "here: shape: must be a group of settings (kind, radius, round, side, tool), not 3"),
    ],
)  # fmt: skip
def test_the_path_and_the_remedy(values: dict, expected: str) -> None:
    assert message_of(values).startswith(expected)


def test_members_of_a_union_are_no_part_of_the_path() -> None:
    message = message_of({"shape": {"kind": "round", "radius": "big"}})
    assert message.count("shape.radius: ") == 1
    assert "'auto'" in message and "integer" in message and "literal" not in message


def test_several_mistakes_are_reported_at_once() -> None:
    message = message_of({"nmae": "x", "shape": {"kind": "round", "radius": 0}})
    assert "nmae: unknown key" in message and "shape.radius: Input should be greater" in message


def test_a_long_value_is_not_repeated_in_full() -> None:
    assert len(message_of({"name": ["x"] * 10_000})) < 200


def test_nearest_says_nothing_when_nothing_is_near() -> None:
    assert nearest("backend", ["backend", "model"]) == "; did you mean 'backend'?"
    assert nearest("zzz", ["backend", "model"]) == ""


@pytest.mark.parametrize("kind", [WorkbenchError, BackendError])
def test_a_cell_shows_one_line_and_the_traceback_when_asked(kind: type[Exception]) -> None:
    shell = pytest.importorskip("IPython.core.interactiveshell", reason="the extra `lab`").InteractiveShell.instance()
    shown: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shell, "_showtraceback", lambda etype, value, lines: shown.append(lines))
        shell.user_ns["kind"] = kind
        shell.run_cell("def wrong():\n    raise kind('no model: name another')\nwrong()", store_history=False)
        shell.run_line_magic("tb", "")
    (line,), traceback = shown[0], "".join(shown[1])
    assert line.replace("\x1b[31m", "").replace("\x1b[0m", "") == f"{kind.__name__}: no model: name another"
    assert "wrong" in traceback and "no model: name another" in traceback and len(shown[1]) > 1
