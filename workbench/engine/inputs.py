"""Convert inputs to requests, validate each once, and define the interface of a runner's owner."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from workbench.errors import WorkbenchError, explain
from workbench.prompt.assemble import Prompt, PromptReader
from workbench.prompt.conversation import Conversation
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Event

RequestInput = str | Conversation | Request | Iterable[str | Conversation | Request]
Streams = TypeVar("Streams", bound=Callable[..., Any])
Result = TypeVar("Result")


def parse_sampling(values: dict[str, Any], where: str = "sampling") -> SamplingParameters:
    """Parse SamplingParameters from plain values; an error is one line that begins with the path of the setting."""
    try:
        return SamplingParameters.model_validate(values)
    except ValidationError as error:
        raise explain(error, where, SamplingParameters) from None


def with_sampling_signature(stream: Streams) -> Streams:
    """Add every sampling parameter, with its type and default, to the signature of `stream`, so that a notebook can
    complete the names.
    """
    known = inspect.signature(stream)
    named = inspect.signature(SamplingParameters).parameters.values()
    kept = [each for each in known.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    stream.__signature__ = known.replace(parameters=[*kept, *named])  # type: ignore[attr-defined] (what inspect reads)
    return stream


def make_requests(
    inputs: RequestInput,
    tokenizer: Tokenizer | None,
    values: dict[str, Any],
    request_ids: Iterator[str],
    assemble: Callable[[Conversation, int], Prompt],
    defaults: Mapping[str, Any] | None = None,
) -> list[Request]:
    """Return requests in the given order; texts and conversations are encoded and take the next id of `request_ids`.

    `assemble` builds the prompt of a conversation, given the number of answer tokens. `defaults` are the model's
    recommended parameters, used where `values` has none; beam search does not use them.
    """
    sampling = parse_sampling({**({} if values.get("beams") else defaults or {}), **values})
    items = [inputs] if isinstance(inputs, str | Conversation | Request) else list(inputs)
    if values and not any(isinstance(item, str | Conversation) for item in items):
        raise WorkbenchError(f"{', '.join(values)}: a Request brings its own sampling; set it there")
    requests = []
    for item in items:
        if isinstance(item, Conversation):
            item = _request_of_conversation(item, assemble, sampling, next(request_ids))
        elif not isinstance(item, Request):
            item = make_request(item, tokenizer, sampling, next(request_ids))
        requests.append(item)
    if is_single(inputs) and requests[0].invalid_reason:
        raise WorkbenchError(requests[0].invalid_reason)
    return requests


def assemble(model: PromptReader, conversation: Conversation, context: int, overflow: str, max_tokens: int) -> Prompt:
    """Return the prompt of a conversation; `overflow` is the policy for prompts over `context` tokens.

    `cut_oldest` keeps `max_tokens` tokens free for the answer, at most half of the context.
    """
    free = min(max_tokens, context // 2) if overflow == "cut_oldest" else 1
    return conversation.prompt(model, context=context, max_tokens=free, overflow=overflow)


def is_single(inputs: RequestInput) -> bool:
    """Return whether `inputs` is a single text or conversation; its errors are raised, not emitted as events."""
    return isinstance(inputs, str | Conversation)


def _request_of_conversation(
    conversation: Conversation,
    assemble: Callable[[Conversation, int], Prompt],
    sampling: SamplingParameters,
    request_id: str,
) -> Request:
    try:
        prompt = assemble(conversation, sampling.max_output_tokens)
    except WorkbenchError as error:
        return Request(request_id, (), sampling, invalid_reason=str(error))
    ends = tuple(dict.fromkeys((*sampling.stop_token_ids, *prompt.end_token_ids)))
    sampling = sampling.model_copy(update={"stop_token_ids": ends})
    return Request(request_id, prompt.ids, sampling, prompt=prompt.text, cut_tokens=prompt.cut_tokens)


def make_request(text: str, tokenizer: Tokenizer | None, sampling: SamplingParameters, request_id: str) -> Request:
    """Encode `text` into a request. If that fails, the request carries the reason, and only this request is refused."""
    try:
        ids = _encode(text, tokenizer)
    except WorkbenchError as error:
        return Request(request_id, (), sampling, prompt=text, invalid_reason=str(error))
    return Request(request_id, ids, sampling, prompt=text)


def _encode(text: str, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if tokenizer is None:
        raise WorkbenchError("this model has no tokenizer: give token ids in a Request, not text")
    ids = tokenizer.encode(text)
    # An empty text stays empty and is refused: begin tokens alone are not a prompt.
    return (*tokenizer.bos_token_ids, *ids) if ids else ()


def sample_id(request_id: str, number: int) -> str:
    """Return the id of one of a request's samples."""
    return f"{request_id}#{number}" if number else request_id


def split_samples(request: Request) -> list[Request]:
    """Split a request into one per sample, with consecutive seeds."""
    asked = request.sampling
    if asked.num_sequences == 1:
        return [request]
    alone: dict[str, Any] = {"n": 1, "best_of": None, "ranking": None, "beams": 0, "search": None}
    if not asked.beams and asked.num_sequences > asked.n and asked.logprobs is None:
        alone["logprobs"] = 0  # they are ranked by the log-probabilities of the chosen tokens
    samples = []
    for number in range(asked.num_sequences):
        own = {**alone, "seed": (asked.seed + number) % 2**63}
        pins = request.pins
        if number:  # the first sample computes the prompt
            own["prompt_logprobs"], pins = None, ()
        name = sample_id(request.request_id, number)
        samples.append(replace(request, request_id=name, sampling=asked.model_copy(update=own), pins=pins))
    return samples


def check_request(request: Request, vocab_size: int) -> None:
    """Raise WorkbenchError for an empty prompt, ids outside the vocabulary, and an invalid arrival time."""
    if request.invalid_reason:
        raise WorkbenchError(f"request {request.request_id}: {request.invalid_reason}")
    if not request.prompt_ids:
        raise WorkbenchError(f"request {request.request_id}: the prompt is empty; give at least one token")
    for name, ids in (("prompt", request.prompt_ids), ("stop_token_ids", request.sampling.stop_token_ids)):
        wrong = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size]
        if wrong:
            raise WorkbenchError(
                f"request {request.request_id}: {name} has token id {wrong[0]!r}, the vocabulary is 0..{vocab_size - 1}"
            )
    for tokens, seconds in request.pins:
        if not 0 <= tokens <= len(request.prompt_ids) or not seconds > 0 or not math.isfinite(seconds):
            raise WorkbenchError(
                f"request {request.request_id}: a pin of {tokens} tokens for {seconds} seconds; the prompt has "
                f"{len(request.prompt_ids)} tokens, and seconds must be above 0"
            )
    if not _is_time(request.arrival):
        raise WorkbenchError(f"request {request.request_id}: arrival is {request.arrival}; give seconds from the start")


def arrival(request: Request) -> float:
    """Return the arrival time in seconds from the start; 0 if it is invalid, since such a request is refused later."""
    return request.arrival if _is_time(request.arrival) else 0.0


def _is_time(arrival: object) -> bool:
    return isinstance(arrival, int | float) and math.isfinite(arrival)


def truncate_prompt(request: Request, max_model_len: int, overflow: str, bos_token_ids: tuple[int, ...]) -> Request:
    """Truncate a prompt that leaves no room for the output, if `overflow` is `cut_oldest`: drop as many of the oldest
    tokens as the output may need.

    At least half of the context stays, and so do the begin tokens that the tokenizer puts before every text.
    """
    ids = request.prompt_ids
    if not isinstance(ids, tuple | list):  # an invalid type, refused later
        words = f"prompt_ids is of type {type(ids).__name__}; give a tuple of token ids"
        return replace(request, prompt_ids=(), invalid_reason=request.invalid_reason or words)
    if overflow != "cut_oldest" or len(ids) < max_model_len:
        return request
    front = bos_token_ids if ids[: len(bos_token_ids)] == bos_token_ids else ()
    kept = max(max_model_len // 2, max_model_len - request.sampling.max_output_tokens) - len(front)
    cut = len(ids) - len(front) - kept
    # The pinned prefix no longer starts the prompt.
    return replace(request, prompt_ids=(*front, *ids[-kept:]), cut_tokens=cut, pins=())


class RunnerOwner(Protocol):
    """The owner of a runner, whose thread uses it while there is work; other threads stream requests through the
    owner.
    """

    def is_current_thread(self) -> bool:
        """Return whether the current thread is the owner's."""
        ...

    def is_other_thread(self) -> bool:
        """Return whether the owner's thread is busy and differs from the current thread."""
        ...

    def stream(self, requests: RequestInput, **sampling: object) -> Iterator[Event]: ...

    def call(self, function: Callable[[Any], Result]) -> Result:
        """Run `function(runner)` between two steps and return its result."""
        ...

    def run_soon(self, function: Callable[[], object]) -> None:
        """Schedule `function` to run in the owner's thread between two steps, and return at once."""
        ...
