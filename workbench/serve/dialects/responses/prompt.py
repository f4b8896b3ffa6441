"""Turn the items of OpenAI's Responses into a conversation, with its breakpoints.

An assistant's message, and the thoughts and calls around it, are separate items of the protocol and one turn of the
conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import WorkbenchError
from workbench.prompt.conversation import Conversation
from workbench.prompt.tools import declare_all
from workbench.prompt.turns import AssistantTurn, ResultTurn, ToolCall, UserTurn, order_results
from workbench.serve.call import Breakpoint
from workbench.serve.dialects.responses.body import (
    FunctionCallItem,
    FunctionOutputItem,
    InputTokensBody,
    MessageItem,
    ReasoningItem,
    RefusalPart,
)
from workbench.serve.dialects.responses.store import StoredResponse
from workbench.serve.errors import invalid_field

SECONDS = {"30m": 1800.0, "12h": 43200.0}


@dataclass
class InputReader:
    """A reader of input items, which collects system texts, turns and breakpoints.

    Args:
        unseal: returns the thought in an `encrypted_content` (WorkbenchError if it was changed).
        system: texts before the first turn, beginning with the previous response's.
        turns: turns of the conversation, beginning with the previous response's.
        breakpoints: breakpoints in the order of the prompt.
    """

    unseal: Callable[[str], str]
    system: list[str] = field(default_factory=list)
    turns: list[UserTurn | AssistantTurn | ResultTurn] = field(default_factory=list)
    breakpoints: list[Breakpoint] = field(default_factory=list)
    in_answer: bool = False  # the last turn is the assistant's, and items may still join it

    def read(self, items: Sequence[Any]) -> None:
        for number, item in enumerate(items):
            where = f"input.{number}"
            if isinstance(item, MessageItem):
                self._message(item, where)
            elif isinstance(item, FunctionOutputItem):
                self._output(item, where)
            elif isinstance(item, FunctionCallItem):
                turn = self._answer()
                call = ToolCall.parse(item.name, item.arguments, item.call_id)
                self.turns[-1] = turn.model_copy(update={"tool_calls": (*turn.tool_calls, call)})
            else:
                turn = self._answer()
                thought = f"{turn.thinking or ''}{self._thought(item, where)}"
                self.turns[-1] = turn.model_copy(update={"thinking": thought})

    def _answer(self) -> AssistantTurn:
        """Return the assistant's turn that the next items join; a new turn after a turn of another role."""
        if not self.in_answer:
            self.turns.append(AssistantTurn())
            self.in_answer = True
        turn = self.turns[-1]
        assert isinstance(turn, AssistantTurn)
        return turn

    def _message(self, item: MessageItem, where: str) -> None:
        texts = [part.refusal if isinstance(part, RefusalPart) else part.text for part in item.content]
        if not texts:
            raise invalid_field(f"{where}.content", "is empty; give a text or a part")
        if item.role == "assistant":
            turn = self._answer()
            self.turns[-1] = turn.model_copy(update={"content": f"{turn.content}{''.join(texts)}"})
            self._mark(item, "turn", len(self.turns) - 1)
        elif item.role == "user" or self.turns:
            self.in_answer = False
            self.turns.append(UserTurn(role="user" if item.role == "user" else "system", content="".join(texts)))
            self._mark(item, "turn", len(self.turns) - 1)
        else:
            self.system += texts
            self._mark(item, "system", sum(map(len, self.system)))

    def _mark(self, item: MessageItem, part: str, index: int) -> None:
        marks = [each.prompt_cache_breakpoint for each in item.content if not isinstance(each, RefusalPart)]
        self.breakpoints += [Breakpoint(part, index, SECONDS[each.ttl]) for each in marks if each is not None]

    def _output(self, item: FunctionOutputItem, where: str) -> None:
        calls = [call for turn in self.turns if isinstance(turn, AssistantTurn) for call in turn.tool_calls]
        name = next((call.name for call in calls if call.id == item.call_id), None)
        if name is None:
            raise invalid_field(f"{where}.call_id", f"no function_call before it has the call_id {item.call_id[:80]!r}")
        words = "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in item.output)
        self.in_answer = False
        self.turns = [*order_results((*self.turns, ResultTurn(content=words, name=name, call_id=item.call_id)))]

    def _thought(self, item: ReasoningItem, where: str) -> str:
        if item.encrypted_content is None:
            return "".join(part.text for part in item.content or item.summary)
        try:
            return self.unseal(item.encrypted_content)
        except WorkbenchError as error:
            raise invalid_field(f"{where}.encrypted_content", str(error)) from None


def read_input(
    body: InputTokensBody, previous: StoredResponse | None, unseal: Callable[[str], str]
) -> tuple[Conversation, InputReader]:
    """Return a body's conversation, and the reader of its input.

    Raises:
        ApiError: invalid_request_error with the path of the error.
    """
    reader = InputReader(unseal)
    if previous is not None:
        reader.system += previous.system
        reader.turns += previous.turns
    reader.read(body.input)
    tools = declare_all(
        {"name": tool.name, "description": tool.description or "",
         "parameters": tool.parameters, "strict": tool.strict}
        for tool in body.tools
    )  # fmt: skip
    texts = [*([body.instructions] if body.instructions else []), *reader.system]
    shift = len(body.instructions or "")
    reader.breakpoints = [
        Breakpoint(each.part, each.index + shift, each.seconds) if each.part == "system" else each
        for each in reader.breakpoints
    ]
    if not reader.turns:
        raise invalid_field("input", "has no message; give what the user says")
    if isinstance(reader.turns[-1], AssistantTurn) and not reader.turns[-1].tool_calls:
        raise invalid_field("input", "ends with the assistant's message; end with a user's, or a function's output")
    try:
        conversation = Conversation(
            system="".join(texts) if texts else None,
            tools=tools,
            turns=tuple(reader.turns),
        )
    except WorkbenchError as error:  # a call without its output; clients do not count turns
        raise invalid_field("input", str(error).removeprefix("conversation: ")) from None
    return conversation, reader
