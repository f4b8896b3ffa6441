"""Declare tools: from Python functions with type hints and docstrings, or from JSON schemas.

A JSON declaration without parameters (absent, null or {}) declares a function without arguments. A schema without
`type` describes an object, since arguments always are an object.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union
from urllib.parse import unquote

from pydantic import Field, ValidationError, field_validator

from workbench.errors import WorkbenchError, explain
from workbench.settings import Settings

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
MAX_SCHEMA_NODES = 10_000
MAX_SCHEMA_DEPTH = 64
SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
CONTAINERS = {list: "array", tuple: "array", dict: "object", set: "array", frozenset: "array"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):\s*$")
_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class Tool(Settings):
    """A tool: the declaration that the model reads, and the function that executes it, if any."""

    name: str
    description: str = ""
    parameters: dict[str, Any]  # a JSON schema of type object
    returns: dict[str, Any] | None = None  # a JSON schema of the result, for templates that show it
    given: dict[str, Any] | None = None  # the JSON declaration as given, if templates must show it unchanged
    strict: bool = False  # constrain calls to the whole schema; refuse a schema for which this is impossible
    function: Callable[..., Any] | None = Field(default=None, exclude=True, repr=False)

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError("a tool's name must have 1 to 128 letters, digits, _, - and .")
        return value

    @field_validator("parameters")
    @classmethod
    def _object(cls, value: dict[str, Any]) -> dict[str, Any]:
        kinds = value.get("type", "object")
        if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            raise ValueError('must be a JSON schema with "type": "object"')
        check_schema_size(value, "parameters")
        return value

    def declaration(self) -> dict[str, Any]:
        """Return the declaration in OpenAI's format, which templates read."""
        if self.given is not None:
            return self.given
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        if self.returns is not None:
            function["return"] = self.returns
        return {"type": "function", "function": function}


def declare(tool: Tool | Callable[..., Any] | Mapping[str, Any]) -> Tool:
    """Return the tool that a function, a JSON declaration or a `Tool` describes.

    A function's description is its docstring before `Args:`; an argument's description is its line there; an argument
    without a default is required.

    Raises:
        WorkbenchError: names what is missing: a schema, a type hint or a docstring.
    """
    if isinstance(tool, Tool):
        return tool
    try:
        if isinstance(tool, Mapping):
            return _from_json(tool)
        if callable(tool):
            return _from_function(tool)
    except ValidationError as error:
        raise explain(error, "tool", Tool) from None
    raise WorkbenchError(f"tool: a {type(tool).__name__}; give a function, a JSON declaration or a Tool")


def declare_all(tools: Iterable[Tool | Callable[..., Any] | Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Return the tools that `declare` makes of each; WorkbenchError if two have the same name."""
    declared: dict[str, Tool] = {}
    for each in tools:
        tool = declare(each)
        if tool.name in declared:
            raise WorkbenchError(f"two tools are named {tool.name!r}: a call could not say which it means; rename one")
        declared[tool.name] = tool
    return tuple(declared.values())


def check_schema_size(schema: Any, where: str) -> None:
    """Raise WorkbenchError if a schema is nested too deep or has too many parts."""
    waiting: list[tuple[Any, int]] = [(schema, 0)]
    count = 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise WorkbenchError(
                f"{where}: a schema nested more than {MAX_SCHEMA_DEPTH} deep; use $defs, or flatten it"
            )
        if count > MAX_SCHEMA_NODES:
            raise WorkbenchError(f"{where}: a schema of more than {MAX_SCHEMA_NODES:,} parts; split the tool")
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        waiting += ((each, depth + 1) for each in inner)


def follow(schema: Any, reference: str) -> tuple[Any, tuple[str | int, ...], str]:
    """Resolve a reference within a schema: return its target, its path, and the first path step that is missing, if
    any. References to an anchor or out of the schema have no target.
    """
    node, path = schema, ()
    if reference != "#" and not reference.startswith("#/"):
        return None, path, reference
    for name in reference.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node, path = node[name], (*path, name)
        elif isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node, path = node[int(name)], (*path, int(name))
        else:
            return None, path, name
    return node, path, ""


def _from_json(given: Mapping[str, Any]) -> Tool:
    given = given.get("given") or given  # a `Tool` as plain values
    function = given.get("function", given)  # OpenAI's chat format nests it; Responses and Anthropic's do not
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise WorkbenchError('tool: must have a name: {"type": "function", "function": {"name", "parameters"}}')
    where = f"tool {function['name']!r}"
    schema = next((function[key] for key in ("parameters", "input_schema") if function.get(key) is not None), {})
    if not isinstance(schema, Mapping):
        raise WorkbenchError(f'{where}: has no schema; give parameters: {{"type": "object", "properties": {{}}}}')
    check_schema_size(given, f"{where}: parameters")
    if not schema:
        schema = NO_ARGUMENTS
        given = {**given, "function": {**function, "parameters": schema}} if "function" in given else given
    tool = Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters=dict(schema),
        returns=function.get("return", function.get("returns")),
        strict=function.get("strict") is True,
    )
    shown = "function" in given and json.dumps(given) != json.dumps(tool.declaration())
    return tool.model_copy(update={"given": dict(given)}) if shown else tool


def _from_function(function: Callable[..., Any]) -> Tool:
    name = getattr(function, "__name__", type(function).__name__)
    where = f"tool {name!r}"
    words, arguments, returned = _parse_docstring(inspect.getdoc(function) or "")
    if not words:
        raise WorkbenchError(f"{where}: has no docstring; say in it what the tool does, for the model to read")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
    except (NameError, TypeError, ValueError) as error:
        raise WorkbenchError(f"{where}: its type hints cannot be read ({error})") from None
    properties, required = {}, []
    for key, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise WorkbenchError(f"{where}: argument {parameter} cannot be given by name; name each argument")
        if key not in hints:
            raise WorkbenchError(f"{where}: argument {key!r} has no type hint; the model needs its type")
        schema = _schema(hints[key], f"{where}: argument {key!r}")
        properties[key] = {**schema, "description": arguments[key]} if key in arguments else schema
        if parameter.default is parameter.empty:
            required.append(key)
    result = hints.get("return", type(None))
    returns = None if result is type(None) else _schema(result, f"{where}: what it returns", lenient=True)
    if returns is not None and returned:
        returns["description"] = returned
    listed = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    return Tool(name=name, description=words, parameters=listed, returns=returns, function=function)


def _schema(hint: Any, where: str, lenient: bool = False) -> dict[str, Any]:
    """Return the JSON schema of a type hint; `lenient`: an empty schema for types that JSON does not have."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin is typing.Annotated:
        words = next((each for each in inner[1:] if isinstance(each, str)), None)
        schema = _schema(inner[0], where, lenient)
        return schema if words is None else {**schema, "description": words}
    if hint in SCALARS:
        return {"type": SCALARS[hint]}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choices([member.value for member in hint], where)
    if origin is Literal:
        return _choices(list(inner), where)
    if origin in (Union, types.UnionType):
        members = [_schema(each, where, lenient) for each in inner if each is not type(None)]
        plain = all(set(each) == {"type"} for each in members)
        schema = members[0] if len(members) == 1 else (
            {"type": [each["type"] for each in members]} if plain else {"anyOf": members}
        )  # fmt: skip
        return {**schema, "nullable": True} if type(None) in inner else schema
    container = CONTAINERS.get(origin or hint)
    if container == "object":
        return {"type": "object", **({"additionalProperties": _schema(inner[1], where, lenient)} if inner else {})}
    if container == "array":
        if origin is tuple and inner and inner[-1] is not ...:
            return {"type": "array", "prefixItems": [_schema(each, where, lenient) for each in inner]}
        return {"type": "array", **({"items": _schema(inner[0], where, lenient)} if inner else {})}
    if hasattr(hint, "model_json_schema"):  # a pydantic model
        return hint.model_json_schema()
    if lenient:
        return {}
    name = getattr(hint, "__name__", str(hint))
    raise WorkbenchError(
        f"{where} is a {name}, which JSON does not have; use str, int, float, bool, list, dict, Literal"
    )


def _choices(values: list[Any], where: str) -> dict[str, Any]:
    if not values or any(type(each) not in SCALARS for each in values):
        raise WorkbenchError(f"{where}: its choices must be texts, numbers, booleans or None")
    kinds = list(dict.fromkeys(SCALARS[type(each)] for each in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _parse_docstring(text: str) -> tuple[str, dict[str, str], str]:
    """Parse a docstring in Google's style: the description, the descriptions of arguments by name, and that of the
    result.
    """
    sections: dict[str, list[str]] = {"": []}
    section = sections[""]
    for line in text.splitlines():
        heading = _SECTION.match(line)
        if heading:
            section = sections.setdefault(heading[1], [])
        else:
            section.append(line)
    arguments: dict[str, str] = {}
    lines = sections.get("Args") or sections.get("Arguments") or sections.get("Parameters") or []
    depth = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    name = ""
    for line in filter(str.strip, lines):
        argument = _ARGUMENT.match(line) if len(line) - len(line.lstrip()) == depth else None
        if argument:
            name = argument[1]
            arguments[name] = argument[2].strip()
        elif name:
            arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    returned = " ".join(line.strip() for line in sections.get("Returns", []) if line.strip())
    return "\n".join(sections[""]).strip(), arguments, returned
