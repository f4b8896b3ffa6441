"""Turn the messages of Anthropic's protocol into a conversation, with its breakpoints.

One message may become several turns: each tool result of a user's message becomes a turn, and its text another. A
breakpoint in a message applies to the end of its turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import WorkbenchError
from workbench.prompt.conversation import Conversation
from workbench.prompt.tools import Tool, declare_all
from workbench.prompt.turns import AssistantTurn, ResultTurn, ToolCall, UserTurn, order_results
from workbench.serve.call import Breakpoint
from workbench.serve.dialects.anthropic.body import (
    CacheControl,
    CountTokensBody,
    Message,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolDeclaration,
    ToolResultBlock,
    ToolUseBlock,
)
from workbench.serve.dialects.thought_signature import ThoughtSigner
from workbench.serve.errors import invalid_field

SECONDS = {"5m": 300.0, "1h": 3600.0}
MAX_BREAKPOINTS = 4
ERROR_PREFIX = "Error: "


@dataclass
class _Reader:
    """A collector of turns and breakpoints, in the order of the prompt."""

    model: str
    signer: ThoughtSigner
    turns: list[UserTurn | AssistantTurn | ResultTurn] = field(default_factory=list)
    breakpoints: list[tuple[Breakpoint, str]] = field(default_factory=list)  # each with its path

    def mark(self, control: CacheControl | None, part: str, index: int, where: str) -> None:
        if control is not None:
            self.breakpoints.append((Breakpoint(part, index, SECONDS[control.ttl]), f"{where}.cache_control"))

    def read_message(self, message: Message, number: int) -> None:
        where = f"messages.{number}.content"
        if message.role == "system":
            blocks = [_text_block(block, f"{where}.{n}") for n, block in enumerate(message.content)]
            self.turns.append(UserTurn(role="system", content="".join(block.text for block in blocks)))
            for n, block in enumerate(blocks):
                self.mark(block.cache_control, "turn", len(self.turns) - 1, f"{where}.{n}")
        elif message.role == "user":
            self._read_user(message.content, where)
        else:
            self._read_assistant(message.content, where)

    def _read_user(self, blocks: Sequence[Any], where: str) -> None:
        texts: list[str] = []
        results: list[ResultTurn] = []
        controls: list[tuple[CacheControl | None, bool, str]] = []
        for place, block in enumerate(blocks):
            path = f"{where}.{place}"
            if isinstance(block, ToolResultBlock):
                if texts:
                    raise invalid_field(path, "results of tools come before the text of a message; put them first")
                results.append(self._result(block, path))
            elif isinstance(block, TextBlock):
                texts.append(block.text)
            else:
                raise invalid_field(path, f"a user's message has no block of type {block.type!r}")
            controls.append((block.cache_control, isinstance(block, ToolResultBlock), path))
        if not blocks:
            raise invalid_field(where, "is empty; give a text or a block")
        first = len(self.turns)
        self.turns += results
        self.turns = list(order_results(tuple(self.turns)))
        if texts:
            self.turns.append(UserTurn(content="".join(texts)))
        seen = 0
        for control, is_result, path in controls:
            self.mark(control, "turn", first + seen if is_result else len(self.turns) - 1, path)
            seen += is_result

    def _result(self, block: ToolResultBlock, path: str) -> ResultTurn:
        texts = [_text(each, f"{path}.content.{n}") for n, each in enumerate(block.content)]
        content = "".join([ERROR_PREFIX] * block.is_error + texts)
        names = {
            call.id: call.name for turn in self.turns if isinstance(turn, AssistantTurn) for call in turn.tool_calls
        }
        name = names.get(block.tool_use_id)
        if name is None:
            raise invalid_field(
                f"{path}.tool_use_id", f"no tool_use block before it has the id {block.tool_use_id[:80]!r}"
            )
        return ResultTurn(content=content, name=name, call_id=block.tool_use_id)

    def _read_assistant(self, blocks: Sequence[Any], where: str) -> None:
        texts, thoughts, calls = [], [], []
        for place, block in enumerate(blocks):
            path = f"{where}.{place}"
            if isinstance(block, ThinkingBlock | RedactedThinkingBlock):
                thoughts.append(self._thought(block, place, path))
            elif isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolUseBlock):
                calls.append(ToolCall(name=block.name, arguments=block.input, id=block.id))
            else:
                raise invalid_field(path, f"an assistant's message has no block of type {block.type!r}")
            if not isinstance(block, ThinkingBlock | RedactedThinkingBlock):
                self.mark(block.cache_control, "turn", len(self.turns), path)
        thought = "".join(thoughts) if thoughts else None
        self.turns.append(AssistantTurn(content="".join(texts), thinking=thought, tool_calls=tuple(calls)))

    def _thought(self, block: ThinkingBlock | RedactedThinkingBlock, place: int, path: str) -> str:
        try:
            if isinstance(block, RedactedThinkingBlock):
                return self.signer.unseal(self.model, place, block.data)
            if not block.thinking and "." in block.signature:
                return self.signer.unseal(self.model, place, block.signature)
            self.signer.check(self.model, place, block.thinking, block.signature)
        except WorkbenchError as error:
            name = "data" if isinstance(block, RedactedThinkingBlock) else "signature"
            raise invalid_field(f"{path}.{name}", str(error)) from None
        return block.thinking


def read_conversation(body: CountTokensBody, signer: ThoughtSigner) -> tuple[Conversation, tuple[Breakpoint, ...]]:
    """Return a body's conversation and its breakpoints.

    Raises:
        ApiError: invalid_request_error with the path of the error: a changed thought, a result without its call, a
            fifth breakpoint, a breakpoint of 1h after one of 5m.
    """
    reader = _Reader(body.model, signer)
    tools = tuple(_tools(body.tools))
    for index, tool in enumerate(body.tools):
        reader.mark(tool.cache_control, "tools", index, f"tools.{index}")
    leading = _leading_system(body.messages)
    system = [(block, f"system.{n}") for n, block in enumerate(body.system)]
    for number, message in enumerate(body.messages[:leading]):
        path = f"messages.{number}.content"
        system += [(_text_block(block, f"{path}.{n}"), f"{path}.{n}") for n, block in enumerate(message.content)]
    characters = 0
    for block, path in system:
        characters += len(block.text)
        reader.mark(block.cache_control, "system", characters, path)
    for number, message in enumerate(body.messages[leading:], leading):
        reader.read_message(message, number)
    if reader.turns and isinstance(reader.turns[-1], AssistantTurn):
        raise invalid_field(
            f"messages.{len(body.messages) - 1}",
            "the last message is the assistant's, and to continue it is not supported; end with a user's",
        )
    if body.cache_control is not None:
        reader.mark(body.cache_control, "turn", len(reader.turns) - 1, "")
    whole = "".join(block.text for block, _ in system) if system else None
    try:
        conversation = Conversation(system=whole, tools=tools, turns=tuple(reader.turns))
    except WorkbenchError as error:  # a call without its result; clients do not count turns
        raise invalid_field("messages", str(error).removeprefix("conversation: ")) from None
    return conversation, _checked(reader.breakpoints)


def _checked(marked: Sequence[tuple[Breakpoint, str]]) -> tuple[Breakpoint, ...]:
    if len(marked) > MAX_BREAKPOINTS:
        raise invalid_field(
            marked[MAX_BREAKPOINTS][1].lstrip("."),
            f"is breakpoint {MAX_BREAKPOINTS + 1} of {len(marked)}; a prompt has at most {MAX_BREAKPOINTS}",
        )
    for (before, _), (after, path) in zip(marked, marked[1:], strict=False):
        if after.seconds > before.seconds:
            raise invalid_field(
                f"{path}.ttl".lstrip("."),
                "a breakpoint of 1h comes before all of 5m, in the order tools, system, messages",
            )
    return tuple(each for each, _ in marked)


def _tools(declared: Iterable[ToolDeclaration]) -> Iterator[Tool]:
    return iter(
        declare_all(
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
            for tool in declared
        )
    )


def _leading_system(messages: Sequence[Message]) -> int:
    return next((n for n, each in enumerate(messages) if each.role != "system"), len(messages))


def _text_block(block: Any, path: str) -> TextBlock:
    if not isinstance(block, TextBlock):
        raise invalid_field(path, f"must be a block of type 'text' here, not {block.type!r}")
    return block


def _text(block: Any, path: str) -> str:
    return _text_block(block, path).text
