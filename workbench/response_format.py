"""Define the format of an answer (JSON of a schema, one of several choices, a regular expression, a Lark grammar), and
the thinking before it. Plain values; `constrained/grammar.py` implements them.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from workbench.settings import NonNegative, Settings

MAX_SCHEMA_DEPTH = 100  # nesting depth of objects and lists: the compiler's JSON reader allows 127
MAX_INTEGER_BITS = 1024  # the compiler's JSON reader accepts numbers up to the range of float64
MAX_GRAMMAR_CHARACTERS = 1 << 20
MAX_REGEX_CHARACTERS = 1 << 16
MAX_CHOICES = 20_000
Whitespace = Annotated[int, Field(ge=0, le=64)]


class JSONSchema(Settings):
    """An answer that is JSON, valid under `json_schema` (drafts 7 to 2020-12), with properties in the schema's order.

    Annotations, unknown keywords and unknown formats are ignored. An unsupported constraining keyword is refused, with
    its name and path, when the request is submitted.
    """

    kind: Literal["json_schema"] = "json_schema"
    json_schema: dict[str, Any] | bool
    # Maximum spaces and line feeds between two JSON tokens; None: exactly one space after a comma and a colon
    max_whitespace: Whitespace | None = None

    @field_validator("json_schema", mode="before")
    @classmethod
    def _is_bounded_json(cls, value: object) -> object:
        check_json(value)
        return value


class Choices(Settings):
    """An answer that is one of `choices`, word for word."""

    kind: Literal["choices"] = "choices"
    choices: tuple[str, ...]

    @field_validator("choices")
    @classmethod
    def _are_some(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not 0 < len(value) <= MAX_CHOICES:
            raise ValueError(f"give 1 to {MAX_CHOICES} choices, not {len(value)}")
        if "" in value:
            raise ValueError("a choice must not be empty")
        for index, each in enumerate(value):
            _check_characters(each, f".[{index}]")
        return value


class Regex(Settings):
    """An answer that a regular expression matches completely. Syntax of Rust's `regex`, without look-around."""

    kind: Literal["regex"] = "regex"
    regex: Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARACTERS)]


class Lark(Settings):
    """An answer of a context-free grammar in llguidance's Lark. A control token is named without quotes: `<|tool|>`,
    and one that has no angle brackets gets them: `<|[TOOL_CALLS]|>`."""

    kind: Literal["lark"] = "lark"
    lark: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]  # the grammar
    max_whitespace: Whitespace | None = None  # maximum between JSON tokens of %json; None: see spaced_json
    spaced_json: bool = False  # %json has ", " and ": " and no other space, as json.dumps writes it
    labels: dict[str, str] = {}  # name of a rule's %json schema in error messages, by rule
    loose: tuple[str, ...] = ()  # labels of schemas that are replaced by any JSON if they cannot be compiled


ResponseFormat = Annotated[JSONSchema | Choices | Regex | Lark, Field(discriminator="kind")]


class Thinking(Settings):
    """A thought before the answer, between two control tokens, of at most `budget_tokens` tokens.

    It begins in the prompt (a template may open it) or with the first token. At the budget, or at a sentence's end
    shortly before it, only the closing token is allowed. Other control tokens and end tokens are forbidden within it.
    """

    budget_tokens: NonNegative  # maximum tokens of the thought; 0: no thought
    shown: bool = True  # emit its text, as events of the channel "thought"
    soft_tokens: NonNegative = 16  # last tokens of the budget, where a sentence's end closes the thought
    opening: str = "<|think|>"  # the control token that opens a thought
    closing: str = "<|/think|>"  # the control token that closes it
    within_max_tokens: bool = False  # max_tokens limits thought and answer together

    @property
    def extra_tokens(self) -> int:
        """Return the number of tokens in addition to the answer's max_tokens: the thought and its two control
        tokens.
        """
        return 0 if self.within_max_tokens else self.budget_tokens + 2


def check_json(value: object) -> None:
    """Raise ValueError, with the path, for a value that is not JSON, is nested too deep or is too long; without
    recursion.
    """
    stack: list[tuple[object, str, int]] = [(value, "", 0)]
    characters = 0
    while stack:
        each, path, depth = stack.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise ValueError(f"nested deeper than {MAX_SCHEMA_DEPTH} levels: {path[1:80]}...")
        if isinstance(each, dict):
            for key, inner in each.items():
                if not isinstance(key, str):
                    raise ValueError(f"{path[1:] or 'top level'}: the key {key!r} is no string")
                _check_characters(key, path)
                characters += len(key)
                stack.append((inner, f"{path}.{key}", depth + 1))
        elif isinstance(each, list | tuple):
            stack += [(inner, f"{path}[{index}]", depth + 1) for index, inner in enumerate(each)]
        elif isinstance(each, str):
            _check_characters(each, path)
        elif isinstance(each, float) and not math.isfinite(each):
            raise ValueError(f"{path[1:] or 'top level'}: {each} is no JSON number")
        elif isinstance(each, int) and each.bit_length() > MAX_INTEGER_BITS:
            raise ValueError(f"{path[1:] or 'top level'}: an integer of over {MAX_INTEGER_BITS} bits")
        elif not (each is None or isinstance(each, int | float)):
            raise ValueError(f"{path[1:] or 'top level'}: a {type(each).__name__} is no JSON")
        characters += len(each) if isinstance(each, str) else 8
        if characters > MAX_GRAMMAR_CHARACTERS:
            raise ValueError(f"longer than {MAX_GRAMMAR_CHARACTERS} characters")


def _check_characters(text: str, path: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"U+{ord(text[error.start]):04X}"
        raise ValueError(f"{path[1:] or 'top level'}: the lone surrogate {surrogate} is no character") from None
