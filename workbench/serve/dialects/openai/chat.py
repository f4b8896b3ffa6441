"""Speak OpenAI's chat completions, with vLLM's further fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from workbench.constrained.json_closed import answer_of
from workbench.prompt.conversation import Conversation
from workbench.response_format import JSONSchema, ResponseFormat, Thinking
from workbench.serve.answers.pieces import Ended, Piece, PromptRead, Text, Thought, ToolArguments, ToolCallBegun, Used
from workbench.serve.bodies.fields import IgnoredFields, Int, Refused, TokenCount
from workbench.serve.call import Call, Caller
from workbench.serve.dialects.openai.common import (
    DONE,
    EFFORTS,
    FINISH_REASONS,
    NO_ACCOUNT,
    USAGE_SCHEMA,
    Effort,
    OpenAIDialect,
    SamplingBody,
    answer_head,
    chat_logprobs,
    data_event,
    new_id,
    prompt_logprobs_json,
    usage_json,
)
from workbench.serve.dialects.openai.messages import continues_last, read_conversation
from workbench.serve.document import COUNT, OBJECT, TEXT, list_schema, object_schema, one_of, optional
from workbench.serve.errors import ApiError, invalid_field
from workbench.serve.served_model import ServedModel

NO_SOUND = "models here read and write text"
OLD_FUNCTIONS = "it is deprecated at OpenAI; use tools and tool_choice"


class ChatBody(SamplingBody):
    """The body of a chat completion."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    REFUSED: ClassVar[Mapping[str, Refused]] = {
        **SamplingBody.OTHERS_REFUSED,
        "add_special_tokens": Refused("the chat template writes the tokens before a chat", (False, True)),
        "echo": Refused("a chat returns only the answer", (False,)),
        "chat_template": Refused("the model's own chat template is used"),
        "documents": Refused("put documents into a message", ([],)),
        "reasoning": Refused("use reasoning_effort"),
        "thinking": Refused("use reasoning_effort, or /v1/messages"),
        "max_output_tokens": Refused("use max_tokens"),
        "stop_sequences": Refused("use stop", ([],)),
        **dict.fromkeys(("system", "instructions"), Refused("put it into a message of the role system", ("", []))),
        **dict.fromkeys(("text", "output_config"), Refused("use response_format or reasoning_effort")),
        "include_reasoning": Refused("a thought is always returned, separate from the answer", (True,)),
        "audio": Refused(NO_SOUND),
        "modalities": Refused(NO_SOUND, (["text"],)),
        "functions": Refused(OLD_FUNCTIONS, ([],)),
        "function_call": Refused(OLD_FUNCTIONS, ("none", "auto")),
        "moderation": Refused("moderation is set at the gateway"),
        "web_search_options": Refused("the server does not access the network"),
    }
    IGNORED: ClassVar[Mapping[str, str]] = {
        **SamplingBody.OTHERS_IGNORED,
        "prediction": "drafts come from the server's own speculation, and change no answer",
        "store": "chats are not stored; /v1/responses are",
        "prompt_cache_options": "put prompt_cache_breakpoint into content parts",
        "mm_processor_kwargs": NO_SOUND,
        "user": NO_ACCOUNT,
        "safety_identifier": NO_ACCOUNT,
        "metadata": "metadata belongs to stored chats, and chats are not stored",
        "service_tier": "the server has one service tier",
        "verbosity": "the model was not trained for a verbosity",
        "prompt_cache_key": "one server has one cache, so no routing is needed",
        "prompt_cache_retention": "every prefix is cached while there is room; breakpoints have lifetimes",
    }


ANSWER_SCHEMA = object_schema(
    id=TEXT, object=one_of("chat.completion"), created=COUNT, model=TEXT, system_fingerprint=TEXT, usage=USAGE_SCHEMA,
    choices=list_schema(object_schema(
        index=COUNT, finish_reason=one_of("stop", "length", "tool_calls", "content_filter"), logprobs=optional(OBJECT),
        message=object_schema(
            role=one_of("assistant"), content=optional(TEXT), refusal=optional(TEXT),
            optional={"tool_calls": list_schema(object_schema(id=TEXT, type=one_of("function"), function=object_schema(
                name=TEXT, arguments=TEXT,
            )))},
        ),
    )),
)  # fmt: skip


class OpenAIChat(OpenAIDialect):
    """The dialect of `/v1/chat/completions`."""

    name, path, body = "openai.chat", "/v1/chat/completions", ChatBody
    answer_schema = ANSWER_SCHEMA

    def parse(self, body: ChatBody, model: ServedModel, ignored: IgnoredFields, caller: Caller) -> Call:
        body.note_stream_options(ignored)
        if body.top_logprobs and not body.logprobs:
            raise invalid_field("top_logprobs", "wants logprobs: true")
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise invalid_field("max_tokens", "and max_completion_tokens are one thing; give one")
        conversation, breakpoints = read_conversation(
            body.messages, body.tools or (), ignored,
            continues_last(body.continue_final_message, body.add_generation_prompt),
        )  # fmt: skip
        if body.chat_template_kwargs:
            conversation = conversation.model_copy(update={"template_arguments": dict(body.chat_template_kwargs)})
        more: dict[str, Any] = {}
        if body.logprobs:
            more["logprobs"] = body.top_logprobs or 0
        if (wanted := _response_format(body.response_format, ignored)) is not None:
            more["response_format"] = wanted
        if body.reasoning_effort is not None:
            more["thinking"] = _thinking(body.reasoning_effort, model)
        max_tokens = body.max_completion_tokens or body.max_tokens or model.answer_tokens
        return Call(
            new_id("chatcmpl"), self.name, body.model, (conversation,), body.sampling(max_tokens, **more),
            has_seed=body.seed is not None,
            has_max_tokens=(body.max_completion_tokens or body.max_tokens) is not None,
            tool_choice=_tool_choice(body.tool_choice, conversation, ignored),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            stream=bool(body.stream), prompt_logprobs=body.prompt_logprobs, breakpoints=breakpoints,
            priority=body.priority or 0, deadline=body.deadline, ignored=ignored,
            options={"include_usage": body.includes_usage, "continuous_usage": body.repeats_usage,
                     "token_ids": bool(body.return_token_ids),
                     "tokens_as_ids": bool(body.return_tokens_as_token_ids)},
        )  # fmt: skip

    def writer(self, call: Call, model: ServedModel) -> ChatWriter:
        return ChatWriter(call, model)

    def answer(self, call: Call, model: ServedModel, pieces: Sequence[Piece]) -> dict[str, Any]:
        choices = [_WholeChoice(number) for number in range(call.num_choices)]
        found = {**answer_head(call, model, "chat.completion"), "choices": []}
        for piece in pieces:
            if isinstance(piece, Used):
                found["usage"] = usage_json(piece)
            elif isinstance(piece, PromptRead):
                if call.options.get("token_ids"):
                    found["prompt_token_ids"] = piece.token_ids
                if call.prompt_logprobs is not None:
                    found["prompt_logprobs"] = prompt_logprobs_json(model, piece.logprobs)
            else:
                choices[piece.choice].add(piece)
        found["choices"] = [each.as_json(call, model) for each in choices]
        return found


def _response_format(given: dict[str, Any] | None, ignored: IgnoredFields) -> ResponseFormat | None:
    kind = None if given is None else given.get("type")
    if given is not None:
        ignored.check(given, ("type", "json_schema") if kind == "json_schema" else ("type",), "response_format")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return JSONSchema(json_schema={"type": "object"})
    if kind != "json_schema":
        known = "text, json_object, json_schema"
        raise invalid_field("response_format.type", f"{str(kind)[:50]!r} is unknown; known: {known}")
    described = given.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else described
    if not isinstance(described, dict) or not isinstance(schema, dict | None):
        raise invalid_field("response_format.json_schema", "must be an object with name and schema")
    # The name and the description are for the model's makers. Every schema is kept to; a strict one is closed too.
    ignored.check(described, ("name", "description", "schema", "strict"), "response_format.json_schema")
    return answer_of(schema or {}, described.get("strict") is True)


def _thinking(effort: str, model: ServedModel) -> Thinking | None:
    if effort == "none":
        return Thinking(budget_tokens=0) if model.can_think else None
    if not model.can_think:
        words = f"reasoning_effort: model {model.name!r} has no control tokens for a thought; use none"
        raise ApiError("invalid_request_error", words, "reasoning_effort", "unsupported")
    return Thinking(budget_tokens=max(1, int(EFFORTS[effort] * model.max_model_len)), within_max_tokens=True)


def _tool_choice(given: str | dict[str, Any] | None, conversation: Conversation, ignored: IgnoredFields) -> str:
    if given is None:
        return "auto"
    if isinstance(given, str):
        if given not in ("none", "auto", "required"):
            words = f"{given[:50]!r} is unknown; known: none, auto, required, or a function by name"
            raise invalid_field("tool_choice", words)
        return given
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if given.get("type") != "function" or not isinstance(function, dict) or not isinstance(name, str):
        words = 'must be {"type": "function", "function": {"name": ...}}; other types are not supported'
        raise invalid_field("tool_choice", words)
    ignored.check(given, ("type", "function"), "tool_choice")
    ignored.check(function, ("name",), "tool_choice.function")
    if name not in {tool.name for tool in conversation.tools}:
        raise invalid_field("tool_choice", f"no tool is named {name[:64]!r}")
    return name


class _WholeChoice:
    """One choice of a plain answer, gathered from its pieces."""

    def __init__(self, number: int):
        self.number = number
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[Any] = []
        self.ended = Ended(number)

    def add(self, piece: Piece) -> None:
        if isinstance(piece, Text):
            self.texts.append(piece.text)
            self.logprobs += piece.logprobs
        elif isinstance(piece, Thought):
            self.thoughts.append(piece.text)
        elif isinstance(piece, ToolCallBegun):
            function = {"name": piece.name, "arguments": ""}
            self.calls.append({"id": piece.id, "type": "function", "function": function})
        elif isinstance(piece, ToolArguments):
            self.calls[piece.index]["function"]["arguments"] += piece.text
        elif isinstance(piece, Ended):
            self.ended = piece

    def as_json(self, call: Call, model: ServedModel) -> dict[str, Any]:
        text = "".join(self.texts)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not self.calls else None}
        message |= {"refusal": None, "annotations": []}
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        wants_logprobs, as_ids = call.sampling.logprobs is not None, bool(call.options.get("tokens_as_ids"))
        found = {
            "index": self.number, "message": message, "finish_reason": FINISH_REASONS[self.ended.reason],
            "logprobs": chat_logprobs(model, self.logprobs, as_ids) if wants_logprobs else None,
            "stop_reason": self.ended.stop,
        }  # fmt: skip
        return found | ({"token_ids": self.ended.token_ids} if call.options.get("token_ids") else {})


class ChatWriter:
    """The writer of a streamed chat. The role comes with the first text, each choice ends with a finish reason, and
    usage follows if requested.
    """

    def __init__(self, call: Call, model: ServedModel):
        self._call, self._model = call, model
        self._head = answer_head(call, model, "chat.completion.chunk")
        self._begun: set[int] = set()
        self._includes_usage = bool(call.options.get("include_usage"))
        self._repeats_usage = bool(call.options.get("continuous_usage"))
        self._shows_ids = bool(call.options.get("token_ids"))
        self._has_logprobs = call.sampling.logprobs is not None
        self._prompt_tokens = self._completion_tokens = 0
        self._prompt: dict[str, Any] = {}  # the prompt's fields in the first chunk

    def write(self, pieces: Sequence[Piece]) -> bytes:
        return b"".join(map(self._event, pieces))

    def _event(self, piece: Piece) -> bytes:
        if isinstance(piece, Text):
            self._completion_tokens += len(piece.token_ids)
            if not piece.text and not piece.logprobs and not self._shows_ids:
                return b""
            return self._chunk(piece, {"content": piece.text})
        if isinstance(piece, Thought):
            self._completion_tokens += len(piece.token_ids)
            return self._chunk(piece, {"reasoning_content": piece.text})
        if isinstance(piece, ToolCallBegun):
            function = {"name": piece.name, "arguments": ""}
            begun = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
            return self._chunk(piece, {"tool_calls": [begun]})
        if isinstance(piece, ToolArguments):
            return self._chunk(piece, {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]})
        if isinstance(piece, Ended):
            first = b"" if piece.choice in self._begun else self._chunk(piece, {"content": ""})
            return first + self._chunk(piece, {}, FINISH_REASONS[piece.reason], piece.stop)
        if isinstance(piece, PromptRead):
            self._prompt_tokens += piece.prompt_tokens
            if self._shows_ids:
                self._prompt["prompt_token_ids"] = piece.token_ids
            if self._call.prompt_logprobs is not None:
                self._prompt["prompt_logprobs"] = prompt_logprobs_json(self._model, piece.logprobs)
            return b""
        if isinstance(piece, Used):
            end = b""
            if self._includes_usage:
                end = data_event({**self._head, "choices": [], "usage": usage_json(piece)})
            return end + DONE
        return b""

    def _chunk(
        self, piece: Piece, delta: dict[str, Any], reason: str | None = None, stop: str | int | None = None
    ) -> bytes:
        if piece.choice not in self._begun:
            self._begun.add(piece.choice)
            delta = {"role": "assistant", **delta}
        choice: dict[str, Any] = {"index": piece.choice, "delta": delta, "logprobs": None, "finish_reason": reason}
        if self._has_logprobs and isinstance(piece, Text) and piece.logprobs:
            as_ids = bool(self._call.options.get("tokens_as_ids"))
            choice["logprobs"] = chat_logprobs(self._model, piece.logprobs, as_ids)
        if reason is not None:
            choice["stop_reason"] = stop
        if self._shows_ids and isinstance(piece, Text | Thought):
            choice["token_ids"] = piece.token_ids
        chunk = {**self._head, **self._prompt, "choices": [choice]}
        self._prompt = {}
        if self._repeats_usage:
            chunk["usage"] = usage_json(Used(0, self._prompt_tokens, self._completion_tokens))
        elif self._includes_usage:
            chunk["usage"] = None
        return data_event(chunk)
