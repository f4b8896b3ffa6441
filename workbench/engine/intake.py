"""What becomes of what a caller asks: texts turn into requests, and requests are looked over once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from workbench.errors import WorkbenchError, explain
from workbench.prompt.tokenizer import Tokenizer
from workbench.request import Request, SamplingParameters

Asked = str | Request | Iterable[str | Request]


def sampling_from(values: dict[str, Any], where: str = "sampling") -> SamplingParameters:
    """SamplingParameters from plain values; a wrong one is a one-line error with its path."""
    try:
        return SamplingParameters.model_validate(values)
    except ValidationError as error:
        raise explain(error, where, SamplingParameters) from None


def requests_from(
    asked: Asked, tokenizer: Tokenizer | None, values: dict[str, Any], first: int
) -> list[Request]:
    """Requests in the order asked; texts are encoded and numbered from `first`."""
    sampling = sampling_from(values)
    items = [asked] if isinstance(asked, str | Request) else list(asked)
    requests = [
        item if isinstance(item, Request) else request_from(item, tokenizer, sampling, f"request-{first + index}")
        for index, item in enumerate(items)
    ]
    if isinstance(asked, str) and requests[0].fault:
        raise WorkbenchError(requests[0].fault)
    return requests


def request_from(text: str, tokenizer: Tokenizer | None, sampling: SamplingParameters, request_id: str) -> Request:
    """A request for `text`. Where it cannot become ids the request carries the fault, and it alone is refused."""
    try:
        ids = _encode(text, tokenizer)
    except WorkbenchError as error:
        return Request(request_id, (), sampling, prompt=text, fault=str(error))
    return Request(request_id, ids, sampling, prompt=text)


def _encode(text: str, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if tokenizer is None:
        raise WorkbenchError("this model has no tokenizer: give token ids in a Request, not text")
    ids = tokenizer.encode(text)
    # An empty text stays empty, and is refused: what a tokenizer puts before every text is no prompt.
    return (*tokenizer.begin_ids, *ids) if ids else ()


def check_ids(requests: Iterable[Request], running: Iterable[str]) -> None:
    """Ids must differ, from each other and from those that run; told before anything starts."""
    seen = set(running)
    for request in requests:
        if request.request_id in seen:
            raise WorkbenchError(f"request id {request.request_id!r} is already taken; ids must differ")
        seen.add(request.request_id)


def check(request: Request, vocab: int) -> None:
    """Refuse what no model could run: nothing at all, or ids that are not in the vocabulary."""
    if request.fault:
        raise WorkbenchError(f"request {request.request_id}: {request.fault}")
    if not request.prompt_ids:
        raise WorkbenchError(f"request {request.request_id}: the prompt is empty; give at least one token")
    for name, ids in (("prompt", request.prompt_ids), ("stop_token_ids", request.sampling.stop_token_ids)):
        wrong = next((i for i in ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise WorkbenchError(
                f"request {request.request_id}: {name} has token id {wrong}, the vocabulary is 0..{vocab - 1}"
            )


def fit(request: Request, context: int, overflow: str) -> Request:
    """Under `cut_oldest`, a prompt that leaves no room loses its oldest tokens, as many as the output may need."""
    if overflow != "cut_oldest" or len(request.prompt_ids) < context:
        return request
    kept = max(1, context - request.sampling.max_tokens)
    cut = len(request.prompt_ids) - kept
    return replace(request, prompt_ids=request.prompt_ids[cut:], cut_tokens=cut)
