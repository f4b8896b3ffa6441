"""Check the sizes of a call before any work: numbers of prompts, choices, tokens, tools and stops, and sizes of
schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from workbench.prompt.conversation import Conversation
from workbench.prompt.turns import AssistantTurn
from workbench.serve.call import Call, PromptInput
from workbench.serve.errors import ApiError
from workbench.settings import Count, Settings

# Each protocol's field names that differ from the names used here.
FIELDS = {
    "openai.chat": {"prompt": "messages", "tokens": "max_completion_tokens", "format": "response_format"},
    "openai.completions": {"prompt": "prompt", "tokens": "max_tokens", "format": "response_format"},
    "openai.embeddings": {"prompt": "input"},
    "openai.responses": {"prompt": "input", "tokens": "max_output_tokens", "format": "text.format"},
    "anthropic.messages": {
        "prompt": "messages", "tokens": "max_tokens", "format": "output_config.format", "stop": "stop_sequences",
    },
}  # fmt: skip


class Bounds(Settings):
    """The maximum sizes of a call."""

    prompts: Count = 64  # prompts in one call
    inputs: Count = 2_048  # texts in one call of embeddings
    choices: Count = 128  # answers of a call: prompts times n
    sequences: Count = 128  # sequences of a call: prompts times n, best_of or beams
    output_tokens: Count = 131_072  # tokens of all answers: choices times max_tokens, thoughts included
    prompt_characters: Count = 4_000_000  # characters of all prompts
    prompt_tokens: Count = 1_000_000  # tokens of all prompts
    turns: Count = 2_000
    tools: Count = 128
    schema_characters: Count = 262_144  # characters of the answer's schema or grammar, and of each tool's schema
    stops: Count = 16
    stop_characters: Count = 1_000  # characters of one stop string
    logprobs: Count = 20
    logit_bias: Count = 1_024  # number of token ids with a bias
    breakpoints: Count = 4


def check_bounds(call: Call, bounds: Bounds) -> None:
    """Refuse a call that is too large, before any computation.

    Raises:
        ApiError: invalid_request_error; its `param` is the field's name in the call's protocol.
    """
    names = FIELDS.get(call.dialect, {})
    for field, unit, size, most in _sizes(call, bounds):
        head, _, rest = field.partition(".")
        name = ".".join(filter(None, (names.get(head, head), rest)))
        if size > most:
            raise ApiError("invalid_request_error", f"{name}: {size:,} {unit}; at most {most:,}", name, "too_large")


def fit_output(call: Call, bounds: Bounds) -> Call:
    """Return the call with the number of answer tokens reduced to what the bounds allow, if the client gave
    no number.
    """
    sampling = call.sampling
    most = bounds.output_tokens // (max(1, len(call.prompts)) * sampling.num_sequences)
    over = sampling.max_output_tokens - most
    if call.has_max_tokens or over <= 0 or over >= sampling.max_tokens:
        return call
    return replace(call, sampling=sampling.model_copy(update={"max_tokens": sampling.max_tokens - over}))


def check_prompt_tokens(call: Call, prompt_tokens: int, bounds: Bounds) -> None:
    """Raise ApiError if the prompts of a call have more tokens than the bounds allow."""
    if prompt_tokens > bounds.prompt_tokens:
        name = FIELDS.get(call.dialect, {}).get("prompt", "prompt")
        message = f"{name}: {prompt_tokens:,} tokens; at most {bounds.prompt_tokens:,}"
        raise ApiError("invalid_request_error", message, name, "context_length_exceeded")


def _sizes(call: Call, bounds: Bounds) -> Iterator[tuple[str, str, int, int]]:
    if call.purpose == "embed":
        yield "prompt", "texts", len(call.prompts), bounds.inputs
    elif call.purpose == "answer":
        yield from _answer_sizes(call, bounds)
    for prompt in call.prompts:
        if isinstance(prompt, Conversation):
            yield "prompt", "messages", len(prompt.turns), bounds.turns
            yield "tools", "tools", len(prompt.tools), bounds.tools
            for number, tool in enumerate(prompt.tools):
                size = len(json.dumps(tool.parameters))
                yield f"tools.{number}", "characters of a schema", size, bounds.schema_characters
    characters = sum(map(prompt_characters, call.prompts))
    yield "prompt", "characters", characters, bounds.prompt_characters


def _answer_sizes(call: Call, bounds: Bounds) -> Iterator[tuple[str, str, int, int]]:
    sampling = call.sampling
    sequences = len(call.prompts) * sampling.num_sequences
    yield "prompt", "prompts", len(call.prompts), bounds.prompts
    yield "n", "choices (prompts times n)", call.num_choices, bounds.choices
    name = "beams" if sampling.beams else "best_of" if sampling.best_of else "n"
    yield name, f"sequences (prompts times {name})", sequences, bounds.sequences
    wanted = sequences * sampling.max_output_tokens
    yield "tokens", "tokens of answers (choices times the tokens of each)", wanted, bounds.output_tokens
    yield "stop", "stop sequences", len(sampling.stop) + len(sampling.stop_token_ids), bounds.stops
    longest = max(map(len, sampling.stop), default=0)
    yield "stop", "characters of a stop sequence", longest, bounds.stop_characters
    yield "logprobs", "alternatives", max(sampling.logprobs or 0, call.prompt_logprobs or 0), bounds.logprobs
    yield "logit_bias", "entries", len(sampling.logit_bias), bounds.logit_bias
    yield "cache_control", "breakpoints", len(call.breakpoints), bounds.breakpoints
    if sampling.response_format is not None:
        size = len(sampling.response_format.model_dump_json())
        yield "format", "characters of a schema or grammar", size, bounds.schema_characters


def prompt_texts(prompt: PromptInput) -> list[str]:
    """Return all texts of a prompt: system prompt, tools, documents, turns and template arguments; empty for token ids.

    The schema of the answer is not included: the model does not read it, and the answer itself is moderated.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, Conversation):
        return []
    texts = _message_texts(prompt)
    for value in (*(tool.declaration() for tool in prompt.tools), prompt.template_arguments):
        texts += _texts_in(value)
    return texts


def _message_texts(prompt: Conversation) -> list[str]:
    texts = [] if prompt.system is None else [prompt.system]
    texts += [text for each in prompt.documents for text in _texts_in(each.model_dump(mode="json"))]
    for turn in prompt.turns:
        texts.append(turn.content)
        if isinstance(turn, AssistantTurn):
            texts.append(turn.thinking or "")
            for each in turn.tool_calls:
                texts += _texts_in({each.name: each.arguments})
    return [text for text in texts if text]


def _texts_in(value: object) -> Iterator[str]:
    """Yield the names, texts and numbers of a JSON value."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case dict() as mapping:
                waiting += [*mapping, *mapping.values()]
            case list() | tuple() as values:
                waiting += values
            case str(text) if text:
                yield text
            case bool():
                pass
            case int() | float() as number:
                yield str(number)


def prompt_characters(prompt: PromptInput) -> int:
    """Return the size of a prompt before tokenization: characters of its texts and tools, or the number of its ids."""
    if isinstance(prompt, str | tuple):
        return len(prompt)
    texts = _message_texts(prompt)
    return sum(map(len, texts)) + sum(len(json.dumps(tool.declaration())) for tool in prompt.tools)
