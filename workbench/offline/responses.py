"""Write the response of a batch request as a line of the output file. Equal requests have equal lines: no clock, no
chance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from workbench.offline.requests import CHAT, BatchModel, BatchRequest
from workbench.prompt.tokenization.detokenize import TextPlaces
from workbench.prompt.tokenization.token_names import token_name, token_text, top_by_name
from workbench.request import FinishReason
from workbench.trace.events import Decoded, Finished

CREATED = 0  # where the format wants a time: the same batch gives the same file


def response_line(
    line_id: str, batch_request: BatchRequest, model: BatchModel, ends: Sequence[Finished], tokens: Sequence[Decoded]
) -> bytes:
    """Return the line of a request with all its samples; an error and no body if it failed or was refused.

    Args:
        line_id: the line's id.
        batch_request: the request.
        model: the model that ran it.
        ends: the Finished event of each sample.
        tokens: Decoded events, where log-probabilities are wanted.
    """
    wrong = next((end for end in ends if end.reason in (FinishReason.REFUSED, FinishReason.ERROR)), None)
    if wrong is not None:
        return error_line(
            line_id, batch_request.custom_id, wrong.reason, wrong.error, 400 if wrong.reason == "refused" else 500
        )
    body = _body(line_id, batch_request, model, sorted(ends, key=lambda end: end.sample), tokens)
    return result_line(
        line_id, batch_request.custom_id, {"status_code": 200, "request_id": f"req_{line_id}", "body": body}, None
    )


def error_line(line_id: str, custom_id: str | None, code: str, message: str, status: int = 400) -> bytes:
    response = {"status_code": status, "request_id": f"req_{line_id}", "body": None}
    return result_line(line_id, custom_id, response, {"code": code, "message": message})


def result_line(
    line_id: str, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None
) -> bytes:
    """Return a line of an output file: the status, id and body of a response, or an error."""
    whole = {"id": f"batch_req_{line_id}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(whole).encode() + b"\n"


def _body(
    line_id: str, asked: BatchRequest, model: BatchModel, ends: Sequence[Finished], tokens: Sequence[Decoded]
) -> dict[str, Any]:
    prompt, made = ends[0].prompt_tokens, sum(len(end.token_ids) for end in ends)
    chat = asked.url == CHAT
    chosen = [end for end in ends if end.reason != FinishReason.NOT_CHOSEN]
    choices = []
    for end in chosen:
        mine = [token for token in tokens if token.sample == end.sample]
        logprobs = None
        if not asked.request.final_only:
            places = _places(mine, asked, end.output_text, model)
            logprobs = _chat_logprobs(mine, model) if chat else _logprobs(mine, places, model)
        said = {"message": {"role": "assistant", "content": end.output_text}} if chat else {"text": end.output_text}
        choices.append({"index": end.sample, **said, "logprobs": logprobs, "finish_reason": end.reason})
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{line_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": CREATED,
        "model": model.name,
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made},
    }


def _places(tokens: Sequence[Decoded], asked: BatchRequest, text: str, model: BatchModel) -> list[int]:
    """Return the character of the text at which each token begins."""
    if model.tokenizer is None:
        return [0] * len(tokens)
    places = TextPlaces(model.tokenizer, asked.request.prompt_ids)
    return [min(max(0, places.push(token.token_id)), len(text)) for token in tokens]


def _logprobs(tokens: Sequence[Decoded], places: list[int], model: BatchModel) -> dict[str, Any]:
    return {
        "tokens": [token_name(model.tokenizer, token.token_id) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            top_by_name(model.tokenizer, token.token_id, token.logprob or 0.0, token.top_logprobs) for token in tokens
        ],
        "text_offset": places,
    }


def _chat_logprobs(tokens: Sequence[Decoded], model: BatchModel) -> dict[str, Any]:
    return {
        "content": [
            _one(token.token_id, token.logprob, model)
            | {"top_logprobs": [_one(id, each, model) for id, each in token.top_logprobs]}
            for token in tokens
        ]
    }


def _one(token_id: int, logprob: float | None, model: BatchModel) -> dict[str, Any]:
    exact = [] if model.tokenizer is None else list(model.tokenizer.token_bytes(token_id))
    return {"token": token_text(model.tokenizer, token_id), "logprob": logprob, "bytes": exact}
