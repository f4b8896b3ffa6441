"""Conversations as values: a system prompt, tools, documents and turns, in the order in which a model reads them.

A conversation is frozen: `user`, `answer` and `result` return a longer one, which shares the earlier turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from pydantic import ConfigDict, ValidationError, field_validator, model_validator

from workbench.display import Displayable, Table
from workbench.errors import explain
from workbench.prompt.assemble import Prompt, PromptReader, assemble
from workbench.prompt.tools import Tool, declare_all
from workbench.prompt.turns import (
    SYSTEM_ROLES,
    AssistantTurn,
    Content,
    ResultTurn,
    ToolCall,
    Turn,
    UserTurn,
    as_message,
    check_order,
    describe_turn,
    order_results,
    parse_content,
    parse_turn,
    unanswered_calls,
)
from workbench.settings import Settings


class Document(Settings):
    """A document that the model may use; extra fields go to the template unchanged."""

    model_config = ConfigDict(frozen=True, extra="allow")

    title: str = ""
    text: str


class Conversation(Displayable, Settings):
    """The input of a model: all messages up to the one that it should answer.

    Args:
        system: the system prompt; several blocks are joined.
        tools: functions with type hints and docstrings, JSON declarations, or `Tool` values.
        documents: documents for the template.
        turns: turns in order; a string is a user turn.
        template: the name of one of several templates of the model's folder.
        template_arguments: further variables of the template (`enable_thinking`).
        continues: the model continues the last turn and starts no message of its own.
    """

    system: Content | None = None
    tools: tuple[Tool, ...] = ()
    documents: tuple[Document, ...] = ()
    turns: tuple[Turn, ...] = ()
    template: str | None = None
    template_arguments: dict[str, Any] = {}
    continues: bool = False

    def __init__(self, **values: Any):
        tools = values.get("tools")
        if isinstance(tools, Iterable) and not isinstance(tools, str):
            values["tools"] = declare_all(tools)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(error, "conversation", type(self)) from None

    @field_validator("turns", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        listed = (value,) if isinstance(value, str) else value
        if not isinstance(listed, list | tuple):
            return listed
        return tuple(UserTurn(content=each) if isinstance(each, str) else each for each in listed)

    @model_validator(mode="after")
    def _order(self) -> Self:
        check_order(self.turns)
        return self

    @classmethod
    def from_messages(
        cls,
        messages: Sequence[Mapping[str, Any]],
        tools: Iterable[Any] = (),
        documents: Iterable[Mapping[str, Any]] = (),
        **values: Any,
    ) -> Conversation:
        """Build a conversation from messages in OpenAI's format, as used by clients and `transformers`.

        Raises:
            WorkbenchError: an unknown role or part, an image, or a result without a call; the message gives the path.
        """
        listed = list(messages)
        system = None
        if listed and isinstance(listed[0], Mapping) and listed[0].get("role") in SYSTEM_ROLES:
            system = parse_content(listed.pop(0).get("content"), "messages.0.content")
        first = len(messages) - len(listed)
        turns = [parse_turn(each, f"messages.{first + number}") for number, each in enumerate(listed)]
        return cls(system=system, tools=tuple(tools), documents=tuple(documents), turns=tuple(turns), **values)

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages in the format of chat templates, without keys that have no value."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *map(as_message, self.turns)]

    def prompt(self, model: PromptReader, **options: Any) -> Prompt:
        """Return the prompt for `model` (such as a runner); options are those of `prompt.assemble.assemble`."""
        return assemble(self, model, **options)

    def explain(self, model: PromptReader, previous: Prompt | None = None, **options: Any) -> Table:
        """Return a table of the prompt's segments: tokens, cached tokens, and the first difference from `previous`."""
        prompt = assemble(self, model, **options)
        cached = getattr(model, "cached_tokens", None)
        return prompt.explain(cached(prompt.ids) if cached else None, previous)

    def user(self, content: Content, name: str | None = None) -> Conversation:
        """Return the conversation with one more user message."""
        return self.with_turn(UserTurn(content=content, name=name))

    def answer(
        self,
        content: Content = "",
        thinking: str | None = None,
        tool_calls: Iterable[ToolCall] = (),
        generated_ids: Iterable[int] = (),
    ) -> Conversation:
        """Return the conversation with one more answer of a model."""
        calls, ids = tuple(tool_calls), tuple(generated_ids)
        return self.with_turn(AssistantTurn(content=content, thinking=thinking, tool_calls=calls, generated_ids=ids))

    def result(self, content: Content, call: ToolCall | None = None) -> Conversation:
        """Return the conversation with a tool's result for `call`, by default for the first call without a result.

        Results are stored in the order of the calls, whatever the order of their arrival.
        """
        waiting = self.unanswered_calls
        if call is None and waiting:
            call = waiting[0]
        name, id = (call.name, call.id) if call is not None else ("", "")
        longer = self.with_turn(ResultTurn(content=content, name=name, call_id=id))
        return longer.model_copy(update={"turns": order_results(longer.turns)})

    @property
    def unanswered_calls(self) -> list[ToolCall]:
        """Return the calls of the last answer that have no result yet."""
        return unanswered_calls(self.turns)

    def with_turn(self, turn: UserTurn | AssistantTurn | ResultTurn) -> Conversation:
        """Return the conversation with one more turn; WorkbenchError if the turn is out of order."""
        check_order((*self.turns, turn), len(self.turns))
        return self.model_copy(update={"turns": (*self.turns, turn)})

    def _display_table(self) -> Table:
        rows = [("system", self.system)] if self.system is not None else []
        rows += [("tools", ", ".join(tool.name for tool in self.tools))] if self.tools else []
        rows += (
            [("documents", ", ".join(each.title or "untitled" for each in self.documents))] if self.documents else []
        )
        return Table("conversation", [*rows, *((turn.role, describe_turn(turn)) for turn in self.turns)])
