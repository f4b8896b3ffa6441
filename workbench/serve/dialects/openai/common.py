"""Define what OpenAI's dialects have in common: sampling fields, errors, usage, log-probabilities of tokens."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from workbench.prompt.tokenization.token_names import token_text
from workbench.request import MAX_LOGPROBS, MAX_STOP_STRINGS, SamplingParameters
from workbench.response_format import Choices, JSONSchema, Lark, Regex, ResponseFormat
from workbench.serve.answers.pieces import EndReason, TokenLogprob, Used
from workbench.serve.bodies.fields import Body, IgnoredFields, Int, Refused, Seed
from workbench.serve.bodies.parts import Part
from workbench.serve.call import Call
from workbench.serve.dialect import PING, Dialect, RouteServices
from workbench.serve.document import COUNT, TEXT, object_schema, optional
from workbench.serve.errors import ApiError
from workbench.serve.json_bytes import dumps
from workbench.serve.served_model import ServedModel

if TYPE_CHECKING:
    from fastapi import APIRouter

DONE = b"data: [DONE]\n\n"
ERROR_SCHEMA = object_schema(
    error=object_schema(message=TEXT, type=TEXT, param=optional(TEXT), code=optional(TEXT)),
)
USAGE_SCHEMA = object_schema(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
UNLIKELY = -9999.0  # replaces minus infinity, which JSON does not have
FINISH_REASONS: dict[EndReason, str] = {
    "stop": "stop", "stop_sequence": "stop", "length": "length", "context": "length", "tool_calls": "tool_calls",
    "content_filter": "content_filter", "cancelled": "content_filter",
}  # fmt: skip
STATUS = {"overloaded_error": 503}  # codes of OpenAI that differ from Anthropic's
TYPES = {
    "invalid_request_error": "invalid_request_error", "authentication_error": "invalid_request_error",
    "billing_error": "insufficient_quota", "permission_error": "invalid_request_error",
    "not_found_error": "invalid_request_error", "conflict_error": "invalid_request_error",
    "request_too_large": "invalid_request_error", "rate_limit_error": "rate_limit_error",
    "api_error": "server_error", "unavailable_error": "server_error", "overloaded_error": "server_error",
    "timeout_error": "server_error",
}  # fmt: skip
CODES = {"authentication_error": "invalid_api_key", "rate_limit_error": "rate_limit_exceeded"}
EFFORTS = {"none": 0.0, "minimal": 1 / 64, "low": 1 / 16, "medium": 1 / 8, "high": 1 / 4, "xhigh": 3 / 8, "max": 1 / 2}
OTHER_SAMPLER = "this sampler is not supported; use temperature, top_k, top_p or min_p"
SET_BY_SERVER = "the server sets it from the key's owner, so that tenants share no pages"
NO_STREAM = "the answer is not streamed"
NO_ACCOUNT = "this server has no accounts of end users"

Temperature = Annotated[float, Field(ge=0, le=2)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)]
Priority = Annotated[Int, Field(ge=0, lt=2**31)]  # 0 is the default: a client may only yield to others


def kind_of_prompt(given: Any) -> str:
    """Return a tag for the kind of prompt that `given` appears to be, so that errors refer to this kind; brackets
    distinguish the tag from a field name.
    """
    if not isinstance(given, list):
        return "<text>"
    first = given[0] if given else 0
    return "<texts>" if isinstance(first, str) else "<lists>" if isinstance(first, list) else "<ids>"


class StreamOptions(Part):
    """Options of a stream; `continuous_usage_stats` is vLLM's."""

    IGNORED: ClassVar[Mapping[str, str]] = {"include_obfuscation": "no padding is added to events"}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(Part):
    """vLLM's form of structured outputs; exactly one field is given."""

    json_schema: dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # a grammar in Lark syntax

    REFUSED: ClassVar[Mapping[str, Refused]] = {
        **dict.fromkeys(
            ("json_object", "structural_tag", "whitespace_pattern", "disable_any_whitespace",
             "disable_additional_properties"),
            Refused("give json, regex, choice or grammar", (False,)),
        ),
    }  # fmt: skip

    def format(self) -> ResponseFormat:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ApiError("invalid_request_error", "structured_outputs: give one of json, regex, choice, grammar",
                           "structured_outputs")  # fmt: skip
        if self.json_schema is not None:
            return JSONSchema(json_schema=self.json_schema)
        if self.regex is not None:
            return Regex(regex=self.regex)
        return Choices(choices=tuple(self.choice)) if self.choice is not None else Lark(lark=self.grammar or "")


class SamplingBody(Body):
    """Fields of both kinds of completions. From `top_k` on they are vLLM's."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Int, Field(ge=1, le=1024)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    top_k: Annotated[Int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None  # outside of this range, logits overflow
    ignore_eos: bool | None = None
    stop_token_ids: list[Int] | None = None
    prompt_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Priority | None = None
    deadline: Annotated[float, Field(gt=0, lt=1e9)] | None = None  # seconds, for policies with deadlines
    structured_outputs: StructuredOutputs | None = None

    # Fields of vLLM, llama.cpp and OpenRouter.
    OTHERS_REFUSED: ClassVar[Mapping[str, Refused]] = {
        "cache_salt": Refused(SET_BY_SERVER),
        "min_tokens": Refused("the engine has no minimum length of an answer; use ignore_eos", (0,)),
        "skip_special_tokens": Refused("control tokens are never shown", (True,)),
        "include_stop_str_in_output": Refused("a stop string is never part of the answer", (False,)),
        "truncate_prompt_tokens": Refused("the server's setting `overflow` decides which part of a prompt is cut"),
        "use_beam_search": Refused("answers are sampled, not searched", (False,)),
        "length_penalty": Refused("it belongs to beam search, which is not served", (1.0, 1)),
        "early_stopping": Refused("it belongs to beam search, which is not served", (False,)),
        "logits_processors": Refused("the server runs no code from a request", ([],)),
        "thinking_token_budget": Refused("use reasoning_effort"),
        "max_thinking_tokens": Refused("use reasoning_effort"),
        **dict.fromkeys(("bad_words", "allowed_token_ids"), Refused("use logit_bias", ([],))),
        **dict.fromkeys(
            ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar", "json_schema"),
            Refused("use response_format or structured_outputs"),
        ),
        **dict.fromkeys(
            ("top_a", "mirostat", "dynatemp_range", "dry_multiplier", "xtc_probability"),
            Refused(OTHER_SAMPLER, (0, 0.0)),
        ),
        **dict.fromkeys(("typical_p", "tfs_z"), Refused(OTHER_SAMPLER, (1, 1.0))),
        **dict.fromkeys(("lora_request", "adapter", "plugins", "transforms"), Refused("models cannot change", ([],))),
    }
    OTHERS_IGNORED: ClassVar[Mapping[str, str]] = {
        "request_id": "the server gives each call an id of its own",
        "guided_decoding_backend": "the server has one grammar compiler",
        "spaces_between_special_tokens": "control tokens are never shown",
        "cache_prompt": "every prefix is cached while there is room",
        **dict.fromkeys(("provider", "models", "route"), "the server does not route to other providers"),
    }

    def sampling(self, max_tokens: int, **more: Any) -> SamplingParameters:
        """Return the sampling parameters; ValidationError or ApiError for invalid ones."""
        values: dict[str, Any] = {"max_tokens": max_tokens, "seed": _seed(self.seed)}
        for name in (
            "n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "min_p", "repetition_penalty",
            "ignore_eos",
        ):  # fmt: skip
            if (value := getattr(self, name)) is not None:
                values[name] = value
        if self.top_k is not None:
            values["top_k"] = max(0, self.top_k)
        if self.stop is not None:
            values["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids:
            values["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.logit_bias:
            values["logit_bias"] = {_token_id(name): bias for name, bias in self.logit_bias.items()}
        if self.structured_outputs is not None:
            values["response_format"] = self.structured_outputs.format()
        return SamplingParameters(**(values | more))

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options is not None and self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        return bool(self.stream_options is not None and self.stream_options.continuous_usage_stats)

    def note_stream_options(self, ignored: IgnoredFields) -> None:
        if self.stream_options is not None and not self.stream:
            ignored.add("stream_options", NO_STREAM)


def _seed(seed: int | None) -> int:
    return secrets.randbits(62) if seed is None else seed % 2**63


def _token_id(name: str) -> int:
    if not name.isascii() or not name.isdigit():
        raise ApiError("invalid_request_error", f"logit_bias.{name[:50]}: keys are token ids", "logit_bias")
    return int(name)


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(16)}"


def error_json(error: ApiError) -> tuple[int, dict[str, Any]]:
    """Return an error's status and body in OpenAI's shape."""
    body = {
        "message": error.message,
        "type": TYPES.get(error.kind, "server_error"),
        "param": error.param or None,
        "code": error.code or CODES.get(error.kind),
    }
    return STATUS.get(error.kind, error.status), {"error": body}


class OpenAIDialect:
    """The base class of OpenAI's dialects: it writes errors in OpenAI's shape, and has no further routes."""

    ping, request_id_header, error_schema = PING, "x-request-id", ERROR_SCHEMA

    def error(self, error: ApiError, request_id: str) -> tuple[int, dict[str, Any]]:
        return error_json(error)

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        return data_event(error_json(error)[1])

    def routes(self, services: RouteServices) -> Iterable[APIRouter]:
        return ()

    def tokenizers(self) -> Iterable[Dialect]:
        return ()


def answer_head(call: Call, model: ServedModel, kind: str) -> dict[str, Any]:
    """Return the first fields of an answer or of a streamed chunk: id, kind, time and model."""
    return {
        "id": call.id, "object": kind, "created": int(time.time()), "model": call.model,
        "system_fingerprint": model.fingerprint,
    }  # fmt: skip


def data_event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def usage_json(used: Used) -> dict[str, Any]:
    rejected = used.drafted_tokens - used.accepted_tokens
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": used.written_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": used.thinking_tokens,
            "accepted_prediction_tokens": used.accepted_tokens,
            "rejected_prediction_tokens": rejected,
        },
    }


def chat_logprobs(model: ServedModel, tokens: Sequence[TokenLogprob], as_ids: bool = False) -> dict[str, Any]:
    """Return log-probabilities of tokens in the shape of chat completions."""

    def one(token_id: int, logprob: float | None) -> dict[str, Any]:
        tokenizer = model.tokenizer
        raw = tokenizer.token_bytes(token_id) if tokenizer is not None and tokenizer.has(token_id) else b""
        return {"token": token_text(model.tokenizer, token_id, as_ids), "logprob": finite(logprob), "bytes": list(raw)}

    return {
        "content": [
            {**one(each.token_id, each.logprob), "top_logprobs": [one(*other) for other in each.top]} for each in tokens
        ],
        "refusal": None,
    }


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, UNLIKELY)


def prompt_logprobs_json(model: ServedModel, tokens: Sequence[TokenLogprob]) -> list[Any]:
    """Return log-probabilities of a prompt in vLLM's shape: by token id, null for the first token."""
    found: list[Any] = []
    for each in tokens:
        if each.logprob is None:
            found.append(None)
            continue
        ranked = dict(each.top)
        ranks = {token_id: place for place, token_id in enumerate(sorted(ranked, key=lambda id: -ranked[id]), 1)}
        alternatives = {**ranked, each.token_id: each.logprob}
        found.append({
            str(token_id): {"logprob": finite(value), "rank": ranks.get(token_id),
                            "decoded_token": token_text(model.tokenizer, token_id)}
            for token_id, value in alternatives.items()
        })  # fmt: skip
    return found


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
