"""Speak Anthropic's Messages: `/v1/messages` and the count of a prompt's tokens."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from workbench.request import SamplingParameters
from workbench.response_format import JSONSchema, Thinking
from workbench.serve.answers.pieces import Piece, prompt_tokens
from workbench.serve.bodies.fields import Body, IgnoredFields
from workbench.serve.call import Call, Caller
from workbench.serve.dialects.anthropic import answer as anthropic_answer
from workbench.serve.dialects.anthropic.answer import HIDES_THOUGHTS, MessageWriter, event, whole_message
from workbench.serve.dialects.anthropic.body import EFFORT_SHARES, CountTokensBody, MessagesBody, ToolChoice
from workbench.serve.dialects.anthropic.prompt import read_conversation
from workbench.serve.dialects.thought_signature import ThoughtSigner
from workbench.serve.document import (
    COUNT,
    TEXT,
    list_schema,
    object_schema,
    one_of,
    optional,
)
from workbench.serve.errors import ApiError, invalid_field

if TYPE_CHECKING:
    from fastapi import APIRouter

    from workbench.serve.dialect import Dialect, RouteServices
    from workbench.serve.served_model import ServedModel

TOKENS_WHEN_COUNTED = 8  # max_tokens when only counting: enough for a thought, which the prompt may open
ERROR_KINDS = {"unavailable_error": "overloaded_error", "conflict_error": "invalid_request_error"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


ERROR_SCHEMA = object_schema(type=one_of("error"), error=object_schema(type=TEXT, message=TEXT), request_id=TEXT)
ANSWER_SCHEMA = object_schema(
    id=TEXT, type=one_of("message"), role=one_of("assistant"), model=TEXT, stop_sequence=optional(TEXT),
    content=list_schema(object_schema(type=one_of("text", "thinking", "redacted_thinking", "tool_use"))),
    stop_reason=one_of(
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "model_context_window_exceeded"
    ),
    usage=object_schema(input_tokens=COUNT, output_tokens=COUNT),
)  # fmt: skip


class AnthropicMessages:
    """The dialect of `/v1/messages`."""

    name = "anthropic.messages"
    path = "/v1/messages"
    body: type[Body] = MessagesBody
    ping = anthropic_answer.PING
    request_id_header = "request-id"
    answer_schema, error_schema = ANSWER_SCHEMA, ERROR_SCHEMA

    def __init__(self, signing_key: bytes = b""):
        self.signer = ThoughtSigner(signing_key)

    def parse(self, body: MessagesBody, model: ServedModel, ignored: IgnoredFields, caller: Caller) -> Call:
        conversation, breakpoints = read_conversation(body, self.signer)
        notes: dict[str, Any] = {}
        options: dict[str, Any] = {}
        if body.metadata is not None and body.metadata.user_id is not None:
            notes["metadata"] = {"user_id": body.metadata.user_id}
        if body.thinking is not None and body.thinking.display == "omitted":
            options[HIDES_THOUGHTS] = True
        if body.max_tokens == 0 and body.stream:
            raise invalid_field("max_tokens", "0 only reads the prompt into the cache; leave out stream")
        if body.output_config is not None and body.output_config.effort is not None and not _is_adaptive(body):
            ignored.add("output_config.effort", "is a budget of adaptive thinking only")
        if body.context_management is not None:
            ignored.add("context_management", "the chat template decides which earlier thoughts the model reads")
        choice, parallel = _tool_choice(body.tool_choice)
        diagnostics = body.diagnostics
        return Call(
            id=f"msg_{secrets.token_hex(12)}",
            dialect=self.name,
            model=body.model,
            prompts=(conversation,),
            sampling=_sampling(body, model),
            tool_choice=choice,
            parallel_tool_calls=parallel,
            stream=body.stream,
            breakpoints=breakpoints,
            only_warms=body.max_tokens == 0,
            previous=(diagnostics.previous_message_id or "") if diagnostics is not None else "",
            ignored=ignored,
            notes=notes,
            options=options,
        )

    def writer(self, call: Call, model: ServedModel) -> MessageWriter:
        return MessageWriter(call, self.signer)

    def answer(self, call: Call, model: ServedModel, pieces: Sequence[Piece]) -> dict[str, Any]:
        return whole_message(call, self.signer, pieces)

    def error(self, error: ApiError, request_id: str) -> tuple[int, dict[str, Any]]:
        name = request_id or f"req_{secrets.token_hex(12)}"
        return error.status, {"type": "error", "error": _error_fields(error), "request_id": name}

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        return event("error", error=_error_fields(error), request_id=request_id)

    def routes(self, services: RouteServices) -> Iterable[APIRouter]:
        return ()

    def tokenizers(self) -> Iterable[Dialect]:
        return (AnthropicCount(self.signer),)


class AnthropicCount(AnthropicMessages):
    """The dialect of `/v1/messages/count_tokens`: it reads a prompt as `/v1/messages` does, and returns its number of
    tokens.
    """

    name = "anthropic.count_tokens"
    path = "/v1/messages/count_tokens"
    body: type[Body] = CountTokensBody
    answer_schema = object_schema(input_tokens=COUNT)

    def __init__(self, signer: ThoughtSigner):
        self.signer = signer

    def parse(self, body: CountTokensBody, model: ServedModel, ignored: IgnoredFields, caller: Caller) -> Call:
        values = {name: getattr(body, name) for name in CountTokensBody.model_fields}
        whole = MessagesBody.model_construct({*values}, **values, max_tokens=TOKENS_WHEN_COUNTED)
        return replace(super().parse(whole, model, ignored, caller), purpose="tokenize")

    def answer(self, call: Call, model: ServedModel, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {"input_tokens": prompt_tokens(pieces)}

    def tokenizers(self) -> Iterable[Dialect]:
        return ()


def _sampling(body: MessagesBody, model: ServedModel) -> SamplingParameters:
    given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    output = body.output_config
    if output is not None and output.format is not None:
        values["response_format"] = JSONSchema(json_schema=output.format.schema_)
    if body.stop_sequences:
        values["stop"] = tuple(body.stop_sequences)
    seed = secrets.randbits(62)  # the protocol has no seed
    return SamplingParameters(max_tokens=max(1, body.max_tokens), thinking=_thinking(body, model), seed=seed, **values)


def _thinking(body: MessagesBody, model: ServedModel) -> Thinking | None:
    """Return the thinking settings; None leaves thinking to the model's template."""
    asked = body.thinking
    effort = body.output_config.effort if body.output_config is not None else None
    if asked is None:
        return None
    if asked.type != "enabled" and asked.budget_tokens is not None:
        raise invalid_field("thinking.budget_tokens", "belongs to the type 'enabled'")
    if asked.type == "disabled":
        return Thinking(budget_tokens=0, within_max_tokens=True) if model.can_think else None
    if _is_adaptive(body):
        if not model.can_think:
            return None
        return Thinking(budget_tokens=int(EFFORT_SHARES[effort or "high"] * body.max_tokens), within_max_tokens=True)
    if asked.budget_tokens is None:
        raise invalid_field("thinking.budget_tokens", "is missing; give the most tokens that a thought may have")
    if not model.can_think:
        raise invalid_field("thinking", f"model {body.model!r} has no control tokens of a thought; leave it out")
    if 0 < body.max_tokens <= asked.budget_tokens and not _only_counts(body):
        raise invalid_field("thinking.budget_tokens", f"must be less than max_tokens, {body.max_tokens:,}")
    return Thinking(budget_tokens=asked.budget_tokens, within_max_tokens=True)


def _is_adaptive(body: MessagesBody) -> bool:
    return body.thinking is not None and body.thinking.type == "adaptive"


def _only_counts(body: MessagesBody) -> bool:
    return "max_tokens" not in body.model_fields_set


def _tool_choice(choice: ToolChoice | None) -> tuple[str, bool]:
    if choice is None:
        return "auto", True
    if (choice.name is None) == (choice.type == "tool"):
        raise invalid_field("tool_choice.name", "belongs to the type 'tool', which needs it")
    if choice.type == "none" and choice.disable_parallel_tool_use:
        raise invalid_field("tool_choice.disable_parallel_tool_use", "has no effect where no tool may be called")
    name = choice.name if choice.name is not None else CHOICES[choice.type]
    return name, not choice.disable_parallel_tool_use


def _error_fields(error: ApiError) -> dict[str, str]:
    return {"type": ERROR_KINDS.get(error.kind, error.kind), "message": error.message}
