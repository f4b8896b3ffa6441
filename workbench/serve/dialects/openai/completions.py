"""Speak OpenAI's completions of texts and token ids, with vLLM's further fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag

from workbench.prompt.tokenization.detokenize import TextPlaces
from workbench.prompt.tokenization.token_names import token_name, top_by_name
from workbench.request import MAX_LOGPROBS
from workbench.serve.answers.pieces import Ended, Piece, PromptRead, Text, Thought, TokenLogprob, Used
from workbench.serve.bodies.fields import IgnoredFields, Int, Refused
from workbench.serve.call import Call, Caller, PromptInput
from workbench.serve.dialects.openai.common import (
    DONE,
    FINISH_REASONS,
    NO_ACCOUNT,
    USAGE_SCHEMA,
    OpenAIDialect,
    SamplingBody,
    answer_head,
    data_event,
    finite,
    kind_of_prompt,
    new_id,
    prompt_logprobs_json,
    usage_json,
)
from workbench.serve.document import COUNT, OBJECT, TEXT, list_schema, object_schema, one_of, optional
from workbench.serve.errors import invalid_field
from workbench.serve.served_model import ServedModel

DEFAULT_MAX_TOKENS = 16  # OpenAI's default
MAX_PROMPTS = 1024
Ids = list[Int]


class CompletionBody(SamplingBody):
    """The body of a completion. A prompt is a text, token ids, or a list of either."""

    prompt: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[Ids, Tag("<ids>")]
        | Annotated[list[str], Field(max_length=MAX_PROMPTS), Tag("<texts>")]
        | Annotated[list[Ids], Field(max_length=MAX_PROMPTS), Tag("<lists>")],
        Discriminator(kind_of_prompt),
    ]
    max_tokens: Annotated[Int, Field(ge=0, lt=2**31)] | None = None  # 0 only reads the prompt
    best_of: Annotated[Int, Field(ge=1, le=1024)] | None = None
    echo: bool | None = None
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    REFUSED: ClassVar[Mapping[str, Refused]] = {
        **SamplingBody.OTHERS_REFUSED,
        "add_special_tokens": Refused("the tokenizer adds its special tokens before a text", (True,)),
        **dict.fromkeys(("tools", "messages"), Refused("use /v1/chat/completions", ([],))),
        **dict.fromkeys(("reasoning_effort", "reasoning", "thinking"), Refused("use /v1/chat/completions")),
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), Refused("use max_tokens")),
        "response_format": Refused("use structured_outputs", ({"type": "text"},)),
        "stop_sequences": Refused("use stop", ([],)),
        "suffix": Refused("no model here was trained to fill in before a suffix", ("",)),
    }
    IGNORED: ClassVar[Mapping[str, str]] = {**SamplingBody.OTHERS_IGNORED, "user": NO_ACCOUNT}


ANSWER_SCHEMA = object_schema(
    id=TEXT, object=one_of("text_completion"), created=COUNT, model=TEXT, system_fingerprint=TEXT, usage=USAGE_SCHEMA,
    choices=list_schema(object_schema(
        index=COUNT, text=TEXT, finish_reason=one_of("stop", "length", "content_filter"),
        logprobs=optional(object_schema(
            tokens=list_schema(TEXT), token_logprobs=list_schema(optional({"type": "number", "maximum": 0})),
            top_logprobs=list_schema(optional(OBJECT)), text_offset=list_schema(COUNT),
        )),
    )),
)  # fmt: skip


class OpenAICompletions(OpenAIDialect):
    """The dialect of `/v1/completions`."""

    name, path, body = "openai.completions", "/v1/completions", CompletionBody
    answer_schema = ANSWER_SCHEMA

    def parse(self, body: CompletionBody, model: ServedModel, ignored: IgnoredFields, caller: Caller) -> Call:
        body.note_stream_options(ignored)
        if body.max_tokens == 0 and not body.echo:
            raise invalid_field("max_tokens", "0 only reads the prompt: set echo to return it, or give at least 1")
        n, best_of = body.n or 1, body.best_of
        if best_of is not None and best_of < n:
            raise invalid_field("best_of", f"{best_of} is less than n")
        more: dict[str, Any] = {"logprobs": body.logprobs} if body.logprobs is not None else {}
        if best_of is not None and best_of > n:
            if body.stream:
                raise invalid_field("best_of", "above n cannot be streamed: the best are known only at the end")
            more["best_of"] = best_of
        wanted = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            wanted = max(wanted or 0, body.logprobs)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        return Call(
            new_id("cmpl"), self.name, body.model, _prompts(body.prompt), body.sampling(max_tokens, **more),
            has_seed=body.seed is not None, only_warms=body.max_tokens == 0,
            stream=bool(body.stream), echo=bool(body.echo), prompt_logprobs=wanted, priority=body.priority or 0,
            deadline=body.deadline,
            ignored=ignored,
            options={"include_usage": body.includes_usage, "continuous_usage": body.repeats_usage,
                     "token_ids": bool(body.return_token_ids), "prompt_logprobs": body.prompt_logprobs is not None,
                     "tokens_as_ids": bool(body.return_tokens_as_token_ids)},
        )  # fmt: skip

    def writer(self, call: Call, model: ServedModel) -> CompletionWriter:
        return CompletionWriter(call, model)

    def answer(self, call: Call, model: ServedModel, pieces: Sequence[Piece]) -> dict[str, Any]:
        whole = [_CompletionChoice(number, call, model) for number in range(call.num_choices)]
        found = answer_head(call, model, "text_completion")
        for piece in _shown(call, pieces):
            if isinstance(piece, Used):
                found["usage"] = usage_json(piece)
            elif isinstance(piece, PromptRead):
                for number in range(piece.choice, piece.choice + call.sampling.n):
                    whole[number].begin(piece)
            else:
                whole[piece.choice].add(piece)
        return {**found, "choices": [each.take() for each in whole]}


def _shown(call: Call, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces that the client sees: without the one token of a call that only reads its prompt."""
    for piece in pieces:
        if not call.only_warms:
            yield piece
        elif isinstance(piece, Ended):
            yield Ended(piece.choice, "length")
        elif isinstance(piece, Used):
            yield replace(piece, completion_tokens=0, thinking_tokens=0)
        elif isinstance(piece, PromptRead):
            yield piece


def _prompts(given: Any) -> tuple[PromptInput, ...]:
    if isinstance(given, str):
        return (given,)
    if not given:
        raise invalid_field("prompt", "is empty; give a text, token ids, or a list of them")
    if isinstance(given[0], int):
        return (tuple(given),)
    return tuple(each if isinstance(each, str) else tuple(each) for each in given)


class _CompletionChoice:
    """The unwritten part of one choice of a completion, in OpenAI's shape."""

    def __init__(self, number: int, call: Call, model: ServedModel):
        self.number, self._call, self._model = number, call, model
        self._texts: list[str] = []
        self._tokens: list[tuple[TokenLogprob, int]] = []  # (token, offset of its first character)
        self._ids: list[int] = []
        self._prompt: dict[str, Any] = {}
        self._echoed: tuple[int, ...] = ()  # prompt ids to show as text
        self._first = 0  # characters of the shown prompt
        self._length = 0  # characters of the answer
        self._last = 0  # offset of the last token
        self._places: TextPlaces | None = None
        self._ended: Ended | None = None

    def begin(self, piece: PromptRead) -> None:
        """Take the prompt, which precedes the answer if the call has `echo`."""
        call = self._call
        if call.options.get("token_ids"):
            self._prompt["prompt_token_ids"] = piece.token_ids
        if call.options.get("prompt_logprobs"):
            self._prompt["prompt_logprobs"] = prompt_logprobs_json(self._model, piece.logprobs)
        tokenizer, ids = self._model.tokenizer, piece.token_ids
        if tokenizer is not None and call.sampling.logprobs is not None:
            self._places = TextPlaces(tokenizer, ids)
        if not call.echo:
            return
        given = call.prompts[self.number // call.sampling.n]
        if isinstance(given, str):
            self._texts.append(given)
            self._first = len(given)
        elif tokenizer is not None:
            self._echoed = ids
            self._first = len(tokenizer.decode(ids, special=True))
        places = [0] * len(ids)
        if piece.logprobs and tokenizer is not None:
            of_prompt = TextPlaces(tokenizer, named=not isinstance(given, str))
            places = [min(of_prompt.push(id), self._first) for id in ids]
            if isinstance(given, str) and tokenizer.decode(ids) != given:  # its tokens decode to another text
                read, spans = tokenizer.encode_with_offsets(given)
                own = [first for first, _ in spans] if read == list(ids[-len(read) :]) else places
                places = [0] * (len(ids) - len(own)) + own
        self._tokens += zip(piece.logprobs, places, strict=False)
        self._last = max(places, default=0)

    def _echo(self) -> str:
        """Return the text of a prompt of ids; an answer's first tokens may complete its last character."""
        tokenizer, ids = self._model.tokenizer, self._echoed
        if tokenizer is None or not ids:
            return ""
        self._echoed = ()
        answer = self._ids if self._ended is None else self._ended.token_ids
        shown = [id for id in answer if not tokenizer.is_special(id)]
        return tokenizer.decode([*ids, *shown], special=True)[: self._first]

    def add(self, piece: Piece) -> None:
        if isinstance(piece, Text | Thought):
            self._texts.append(piece.text)
            self._length += len(piece.text)
            self._ids += piece.token_ids
            for token in piece.logprobs if isinstance(piece, Text) else ():
                place = 0 if self._places is None else self._places.push(token.token_id)
                self._last = max(self._last, self._first + place)
                self._tokens.append((token, self._last))
        elif isinstance(piece, Ended):
            self._ended = piece
            end = self._first + self._length  # tokens in or after a stop string have no text
            self._tokens = [(token, min(place, end)) for token, place in self._tokens]

    def take(self) -> dict[str, Any]:
        """Return the part since the last call; a token is included once its first character or the end has come."""
        text = self._echo() + "".join(self._texts)
        ended, shown = self._ended, self._first + self._length
        waits = [ended is None and self._places is not None and place >= shown for _, place in self._tokens]
        count = waits.index(True) if True in waits else len(waits)
        tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        found: dict[str, Any] = {
            "index": self.number, "text": text, "logprobs": self._logprobs(tokens),
            "finish_reason": None if ended is None else FINISH_REASONS[ended.reason],
            "stop_reason": None if ended is None else ended.stop, **self._prompt,
        }  # fmt: skip
        if self._call.options.get("token_ids"):
            found["token_ids"] = list(self._ids)
        self._texts, self._ids, self._prompt = [], [], {}
        return found

    def _logprobs(self, tokens: list[tuple[TokenLogprob, int]]) -> dict[str, Any] | None:
        if self._call.sampling.logprobs is None:
            return None
        as_ids = bool(self._call.options.get("tokens_as_ids"))
        return {
            "tokens": [token_name(self._model.tokenizer, each.token_id, as_ids) for each, _ in tokens],
            "token_logprobs": [finite(each.logprob) for each, _ in tokens],
            "top_logprobs": [self._top(each, as_ids) for each, _ in tokens],
            "text_offset": [place for _, place in tokens],
        }

    def _top(self, token: TokenLogprob, as_ids: bool) -> dict[str, float | None] | None:
        """Return log-probabilities of the likeliest tokens and the token itself; None for a prompt's first token."""
        if token.logprob is None:
            return None
        found = top_by_name(self._model.tokenizer, token.token_id, token.logprob, token.top, as_ids)
        return {name: finite(value) for name, value in found.items()}


class CompletionWriter:
    """The writer of a streamed completion: `write` returns the chunks of pieces as bytes."""

    def __init__(self, call: Call, model: ServedModel):
        self._call = call
        self._choices = [_CompletionChoice(number, call, model) for number in range(call.num_choices)]
        self._head = answer_head(call, model, "text_completion")
        self._includes_usage = bool(call.options.get("include_usage"))
        self._repeats_usage = bool(call.options.get("continuous_usage"))
        self._counts = [0, 0]  # [prompt tokens, answer tokens]

    def write(self, pieces: Sequence[Piece]) -> bytes:
        return b"".join(map(self._event, _shown(self._call, pieces)))

    def _event(self, piece: Piece) -> bytes:
        if isinstance(piece, Used):
            end = data_event({**self._head, "choices": [], "usage": usage_json(piece)}) if self._includes_usage else b""
            return end + DONE
        if isinstance(piece, PromptRead):
            self._counts[0] += piece.prompt_tokens
            for number in range(piece.choice, piece.choice + self._call.sampling.n):
                self._choices[number].begin(piece)
            return b""
        choice = self._choices[piece.choice]
        choice.add(piece)
        if isinstance(piece, Text | Thought):
            self._counts[1] += len(piece.token_ids)
        elif not isinstance(piece, Ended):
            return b""
        chunk = {**self._head, "choices": [choice.take()]}
        if self._repeats_usage:
            chunk["usage"] = usage_json(Used(0, self._counts[0], self._counts[1]))
        elif self._includes_usage:
            chunk["usage"] = None
        return data_event(chunk)
