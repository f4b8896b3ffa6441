"""Parse a line of an OpenAI batch file into a request, or into the reason why it is invalid."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.engine.inputs import make_request, parse_sampling
from workbench.errors import WorkbenchError, nearest
from workbench.files import UnreadableText, read_json, read_json_object
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.prompt.turns import parse_content
from workbench.request import Request, SamplingParameters

LINE_KEYS = ("custom_id", "method", "url", "body")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CODE = {"filters", "sampler", "ranking", "search", "constraint"}  # of a user's own: data name no code to run
SAMPLING_FIELDS = frozenset(SamplingParameters.model_fields) - CODE
DEFAULT_MAX_TOKENS = 16  # tokens of a completion that does not say, as at OpenAI


class InvalidLine(WorkbenchError):
    """An invalid line; the others are not affected."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class BatchModel:
    """A model as batch requests need it: its name, tokenizer, chat template and context length."""

    name: str
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    context: int
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # for what a line leaves open


@dataclass(frozen=True)
class BatchRequest:
    custom_id: str
    url: str
    request: Request


def custom_id_of(raw: bytes) -> str | None:
    """Return a line's custom_id, if it can be read."""
    try:
        name = read_json_object(raw).get("custom_id")
    except UnreadableText:
        return None
    return name if isinstance(name, str) else None


def parse_line(raw: bytes, number: int, model: BatchModel) -> BatchRequest:
    """Parse line `number` (from 1) of a batch.

    Raises:
        InvalidLine: with what is wrong.
    """
    name, url, body = read_line(raw, BODY_PARSERS)
    given = {key: value for key, value in body.items() if value is not None}
    try:
        request = BODY_PARSERS[url](given, str(number), model)
        salt = given.get("cache_salt", "")
        if not isinstance(salt, str):
            raise WorkbenchError(f"body.cache_salt: must be a text, not {salt!r}")
    except WorkbenchError as error:
        raise InvalidLine("invalid_request", str(error)) from None
    # Single tokens are needed only for their log-probabilities.
    return BatchRequest(name, url, replace(request, cache_salt=salt, final_only=request.sampling.logprobs is None))


def _refuse_field(key: str) -> None:
    words = f"{key}: unknown field{nearest(key, LINE_KEYS)}; a line has {', '.join(LINE_KEYS)}"
    raise InvalidLine("invalid_request", words)


def read_line(
    raw: bytes, urls: Collection[str], note_unknown: Callable[[str], None] = _refuse_field
) -> tuple[str, str, dict[str, Any]]:
    """Return the custom_id, the url (one of `urls`) and the body of a line; InvalidLine with what is wrong."""
    line = _object(raw)
    for key, value in line.items():
        if key not in LINE_KEYS and value is not None:
            note_unknown(key)
    name, url, body = line.get("custom_id"), line.get("url"), line.get("body")
    if not isinstance(name, str) or not name:
        raise InvalidLine("invalid_request", f"custom_id: must be a text that names the line, not {name!r}")
    if line.get("method") != "POST":
        raise InvalidLine("invalid_request", f"method: must be 'POST', not {line.get('method')!r}")
    if not isinstance(url, str) or url not in urls:
        hint = nearest(str(url), urls) or f"; known: {', '.join(urls)}"
        raise InvalidLine("invalid_request", f"url: {url!r} is not answered here{hint}")
    if not isinstance(body, dict):
        raise InvalidLine("invalid_request", f"body: must be an object, not {type(body).__name__}")
    return name, url, body


def _object(raw: bytes) -> dict[str, Any]:
    try:
        found = read_json(raw)
    except UnreadableText as error:
        raise InvalidLine("invalid_json", error.reason) from None
    if not isinstance(found, dict):
        raise InvalidLine("invalid_json", f"must be an object with {', '.join(LINE_KEYS)}, not {type(found).__name__}")
    return found


def _completion(body: Mapping[str, Any], name: str, model: BatchModel) -> Request:
    own = _sampling_fields(body, model, "prompt")
    asked = {"max_tokens": DEFAULT_MAX_TOKENS, "seed": int(name), **own}
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return make_request(prompt, model.tokenizer, parse_sampling(asked, "body"), name)
    if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        return Request(name, tuple(prompt), parse_sampling(asked, "body"))
    raise WorkbenchError("body.prompt: must be one text, or one list of token ids; write a line for each of several")


def _chat(body: Mapping[str, Any], name: str, model: BatchModel) -> Request:
    own = _sampling_fields(body, model, "messages", "max_completion_tokens", "logprobs", "top_logprobs")
    wanted = body.get("logprobs", False)
    if not isinstance(wanted, bool):
        raise WorkbenchError(f"body.logprobs: true or false in a chat, not {wanted!r}; top_logprobs is how many")
    if wanted:
        own["logprobs"] = body.get("top_logprobs", 0)
    elif "top_logprobs" in body:
        raise WorkbenchError("body.top_logprobs: wants logprobs: true")
    if "max_completion_tokens" in body:
        if "max_tokens" in own:
            raise WorkbenchError("body: max_tokens and max_completion_tokens are one thing; give one")
        own["max_tokens"] = body["max_completion_tokens"]
    if model.template is None or model.tokenizer is None:
        raise WorkbenchError(f"url: model {model.name!r} has no chat template; ask {COMPLETIONS} instead")
    ids = model.template.ids(_messages(body.get("messages")), model.tokenizer)
    rest = max(1, model.context - len(ids))
    return Request(name, ids, parse_sampling({"max_tokens": rest, "seed": int(name), **own}, "body"))


def _messages(found: Any) -> list[dict[str, str]]:
    if not isinstance(found, list) or not found:
        raise WorkbenchError('body.messages: must be a list such as [{"role": "user", "content": "..."}]')
    messages = []
    for number, each in enumerate(found):
        where = f"body.messages.{number}"
        if not isinstance(each, dict) or not isinstance(each.get("role"), str):
            raise WorkbenchError(f"{where}: must be an object with a role and a content")
        if unknown := [key for key in each if key not in ("role", "content", "name")]:
            raise WorkbenchError(f"{where}.{unknown[0]}: unknown field; a message has role, content, name")
        messages.append({**each, "content": parse_content(each.get("content"), f"{where}.content")})
    return messages


def _sampling_fields(body: Mapping[str, Any], model: BatchModel, *besides: str) -> dict[str, Any]:
    """Return the body's sampling parameters; check fields that are none and not in `besides`."""
    common = {"model", "stream", "user", "cache_salt"}
    known = sorted(SAMPLING_FIELDS | common | set(besides))
    for key in body:
        if key not in known:
            raise WorkbenchError(f"body.{key}: unknown field{nearest(key, known)}")
    if body.get("model", model.name) != model.name:
        raise WorkbenchError(f"body.model: {body['model']!r} is not what runs here; this batch runs {model.name!r}")
    if body.get("stream", False) is not False:
        raise WorkbenchError("body.stream: a batch does not stream; leave it out")
    own = {key: value for key, value in body.items() if key in SAMPLING_FIELDS and key not in besides}
    return {**model.sampling_defaults, **own}


BODY_PARSERS: dict[str, Callable[[Mapping[str, Any], str, BatchModel], Request]] = {
    COMPLETIONS: _completion,
    CHAT: _chat,
}
