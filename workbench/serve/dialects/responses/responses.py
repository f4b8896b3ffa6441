"""Speak OpenAI's Responses: create, continue an earlier response, read again, delete, count the tokens of an input."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from workbench.constrained.json_closed import answer_of
from workbench.prompt.turns import AssistantTurn
from workbench.request import SamplingParameters
from workbench.response_format import JSONSchema, Thinking
from workbench.serve.answers.pieces import Piece, prompt_tokens
from workbench.serve.bodies.fields import Body, IgnoredFields
from workbench.serve.call import Call, Caller
from workbench.serve.dialect import Dialect, RouteServices
from workbench.serve.dialects.openai.common import EFFORTS, NO_STREAM, OpenAIDialect
from workbench.serve.dialects.responses.answer import ResponseWriter
from workbench.serve.dialects.responses.body import InputTokensBody, NamedFunction, ResponsesBody
from workbench.serve.dialects.responses.prompt import read_input
from workbench.serve.dialects.responses.store import ResponseStore, StoredResponse
from workbench.serve.dialects.thought_signature import ThoughtSigner
from workbench.serve.document import (
    COUNT,
    OBJECT,
    TEXT,
    list_schema,
    object_schema,
    one_of,
    optional,
)
from workbench.serve.errors import ApiError, invalid_field
from workbench.serve.served_model import ServedModel

if TYPE_CHECKING:
    from fastapi import APIRouter

SEALED_PLACE = 0  # a response's thought is sealed as its first item
TOKENS_WHEN_COUNTED = 8  # max_tokens when only counting
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"


ANSWER_SCHEMA = object_schema(
    id=TEXT, object=one_of("response"), created_at=COUNT, model=TEXT, error=optional(OBJECT),
    status=one_of("completed", "incomplete", "failed"), incomplete_details=optional(object_schema(reason=TEXT)),
    output=list_schema(object_schema(id=TEXT, type=one_of("message", "reasoning", "function_call"))),
    usage=object_schema(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT),
)  # fmt: skip


class OpenAIResponses(OpenAIDialect):
    """The dialect of `/v1/responses`."""

    name = "openai.responses"
    path = "/v1/responses"
    body: type[Body] = ResponsesBody
    answer_schema = ANSWER_SCHEMA

    def __init__(self, signing_key: bytes = b"", store: ResponseStore | None = None):
        self.signer, self.store = ThoughtSigner(signing_key), ResponseStore() if store is None else store
        self._writers: WeakValueDictionary[str, ResponseWriter] = WeakValueDictionary()  # writers of running streams

    def parse(self, body: ResponsesBody, model: ServedModel, ignored: IgnoredFields, caller: Caller) -> Call:
        previous = None
        if body.previous_response_id is not None:
            previous = self.store.get(body.previous_response_id, caller.tenant, "previous_response_id")
        conversation, reader = read_input(
            body, previous, lambda sealed: self.signer.unseal(body.model, SEALED_PLACE, sealed)
        )
        if body.stream_options is not None and not body.stream:
            ignored.add("stream_options", NO_STREAM)
        cache = body.prompt_cache_options
        if cache is not None and cache.prewarm and body.stream:
            raise invalid_field(
                "prompt_cache_options.prewarm", "only reads the prompt into the cache; leave out stream"
            )
        include = body.include or []
        options = {
            "echo": _echo(body),
            "seals": ENCRYPTED in include,
            "kept": None if body.store is False else (tuple(reader.system), tuple(reader.turns), _items(body)),
        }
        compared = cache.comparison_response_id if cache is not None else None
        choice = body.tool_choice
        return Call(
            id=f"resp_{secrets.token_hex(24)}",
            dialect=self.name,
            model=body.model,
            prompts=(conversation,),
            sampling=_sampling(body, model),
            has_max_tokens=body.max_output_tokens is not None,
            tool_choice=choice.name if isinstance(choice, NamedFunction) else choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            stream=bool(body.stream),
            breakpoints=tuple(reader.breakpoints),
            only_warms=cache is not None and cache.prewarm,
            previous=compared or body.previous_response_id or "",
            ignored=ignored,
            options=options,
        )

    def writer(self, call: Call, model: ServedModel) -> ResponseWriter:
        def finish(response: dict[str, Any], turn: AssistantTurn) -> None:
            if (kept := call.options["kept"]) is not None:
                system, turns, items = kept
                self.store.keep(StoredResponse(call.caller.tenant, system, (*turns, turn), response, items))

        seal = (lambda thought: self.signer.seal(call.model, SEALED_PLACE, thought)) if call.options["seals"] else None
        writer = ResponseWriter(call, model, seal, finish)
        self._writers[call.id] = writer
        return writer

    def answer(self, call: Call, model: ServedModel, pieces: Sequence[Piece]) -> dict[str, Any]:
        writer = self.writer(call, model)
        writer.write(pieces)
        return writer.response

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        writer = self._writers.get(request_id)
        return writer.fail(error) if writer is not None else super().error_event(error, request_id)

    def routes(self, services: RouteServices) -> Iterable[APIRouter]:
        from workbench.serve.dialects.responses.routes import response_routes

        return [response_routes(self.store, services)]

    def tokenizers(self) -> Iterable[Dialect]:
        return (InputTokens(self),)


class InputTokens(OpenAIResponses):
    """The dialect of `/v1/responses/input_tokens`: it reads a prompt as `/v1/responses` does, and returns its number of
    tokens.
    """

    name = "openai.input_tokens"
    path = "/v1/responses/input_tokens"
    body: type[Body] = InputTokensBody
    answer_schema = object_schema(object=one_of("response.input_tokens"), input_tokens=COUNT)

    def __init__(self, whole: OpenAIResponses):
        super().__init__(store=whole.store)
        self.signer = whole.signer

    def parse(self, body: InputTokensBody, model: ServedModel, ignored: IgnoredFields, caller: Caller) -> Call:
        values = {name: getattr(body, name) for name in InputTokensBody.model_fields}
        whole = ResponsesBody.model_construct({*values}, **values, max_output_tokens=TOKENS_WHEN_COUNTED, store=False)
        return replace(super().parse(whole, model, ignored, caller), purpose="tokenize")

    def answer(self, call: Call, model: ServedModel, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": prompt_tokens(pieces)}

    def routes(self, services: RouteServices) -> Iterable[APIRouter]:
        return ()

    def tokenizers(self) -> Iterable[Dialect]:
        return ()


def _sampling(body: ResponsesBody, model: ServedModel) -> SamplingParameters:
    values: dict[str, Any] = {"seed": secrets.randbits(62)}  # the protocol has no seed
    given = {"temperature": body.temperature, "top_p": body.top_p}
    values |= {name: value for name, value in given.items() if value is not None}
    if body.top_logprobs is not None or LOGPROBS in (body.include or []):
        values["logprobs"] = body.top_logprobs or 0
    format = body.text.format if body.text is not None else None
    if format is not None and format.type == "json_object":
        values["response_format"] = JSONSchema(json_schema={"type": "object"})
    elif format is not None and format.type == "json_schema":
        if format.schema_ is None:
            raise invalid_field("text.format.schema", "is missing; give the JSON schema of the answer")
        values["response_format"] = answer_of(format.schema_, bool(format.strict))
    prewarms = body.prompt_cache_options is not None and body.prompt_cache_options.prewarm
    max_tokens = 1 if prewarms else body.max_output_tokens or model.answer_tokens
    return SamplingParameters(max_tokens=max_tokens, thinking=_thinking(body, model), **values)


def _thinking(body: ResponsesBody, model: ServedModel) -> Thinking | None:
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is None:
        return None
    if not model.can_think:
        if effort == "none":
            return None
        raise invalid_field("reasoning.effort", f"model {model.name!r} has no control tokens of a thought; use none")
    budget = 0 if effort == "none" else max(1, int(EFFORTS[effort] * model.max_model_len))
    return Thinking(budget_tokens=budget, within_max_tokens=True)


def _echo(body: ResponsesBody) -> dict[str, Any]:
    """Return the fields of a request that its response repeats."""
    format = body.text.format if body.text is not None and body.text.format is not None else None
    text = {"type": "text"} if format is None else format.model_dump(by_alias=True, exclude_none=True)
    choice = body.tool_choice
    tools = [{**tool.model_dump(), "strict": tool.strict is True} for tool in body.tools]
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": text},
        "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "user": None,
    }


def _items(body: ResponsesBody) -> list[dict[str, Any]]:
    """Return the items of an input for listing, each with an id."""
    listed = []
    for item in body.input:
        values = item.model_dump(exclude_none=True)
        listed.append({"id": f"item_{secrets.token_hex(12)}", "status": "completed", **values})
    return listed
