"""Write answers in the shape of OpenAI's Responses: as events, or whole.

    created  in_progress  ( output_item.added  ...  output_item.done ) ...  completed | incomplete

An item is a thought, a message or a function call; a thought or message contains one part:

    output_item.added  content_part.added  *.delta ...  *.done  content_part.done  output_item.done
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.prompt.cache_miss import CacheMiss
from workbench.prompt.turns import AssistantTurn, ToolCall
from workbench.serve.answers.pieces import Ended, Piece, Text, Thought, ToolArguments, ToolCallBegun, Used
from workbench.serve.call import Call
from workbench.serve.dialects.openai.common import chat_logprobs
from workbench.serve.errors import ApiError
from workbench.serve.json_bytes import dumps
from workbench.serve.served_model import ServedModel

INCOMPLETE = {
    "length": "max_output_tokens",
    "context": "max_output_tokens",
    "content_filter": "content_filter",
    "cancelled": "steered",
}
TWELVE_HOURS = 43200.0
CACHE_MISS = "cache_miss"  # name in the notes of a call
MISS_REASONS = {"model_changed": "model_changed", "tools_changed": "tools_changed"}  # other reasons: input_changed


@dataclass
class ResponseWriter:
    """The writer of one streamed response; `response` is the whole response, once `Used` was written.

    Args:
        call: the call; `options["echo"]` has the fields that the response repeats.
        model: the model that answers.
        seal: returns the `encrypted_content` of a thought; None if the client did not ask for it.
        finish: called at the end with the response and its turn.
    """

    call: Call
    model: ServedModel
    seal: Callable[[str], str] | None = None
    finish: Callable[[dict[str, Any], AssistantTurn], None] = lambda response, turn: None
    sequence: int = 0
    output: list[dict[str, Any]] = field(default_factory=list)
    turn: AssistantTurn = AssistantTurn()
    is_open: bool = False  # the last item of the output
    created: int = field(default_factory=lambda: int(time.time()))
    response: dict[str, Any] = field(default_factory=dict)

    def write(self, pieces: Sequence[Piece]) -> bytes:
        return b"".join(part for piece in pieces for part in self._events(piece))

    def fail(self, error: ApiError) -> bytes:
        """Return the events of an error in mid-stream."""
        code = "rate_limit_exceeded" if error.kind == "rate_limit_error" else "server_error"
        failed = {**self._head("failed"), "error": {"code": code, "message": error.message}, "output": self.output}
        return self._event("response.failed", response=failed) + self._event(
            "error", code=code, message=error.message, param=error.param or None
        )

    def _event(self, kind: str, **values: Any) -> bytes:
        data = {"type": kind, **values, "sequence_number": self.sequence}
        self.sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + dumps(data) + b"\n\n"

    def _events(self, piece: Piece) -> list[bytes]:
        begun = [] if self.response else self._start()
        if self.call.only_warms and not isinstance(piece, Ended | Used):
            return begun
        match piece:
            case Thought(text=text):
                return [*begun, *self._open("reasoning"), *self._say(text)]
            case Text(text=text) if text or piece.logprobs:
                return [*begun, *self._open("message"), *self._say(text, self._logprobs(piece))]
            case ToolCallBegun():
                return [*begun, *self._close(), *self._open("function_call", call_id=piece.id, name=piece.name)]
            case ToolArguments(text=text) if text:
                self.output[-1]["arguments"] += text
                return [*begun, self._delta("response.function_call_arguments.delta", delta=text)]
            case Ended():
                self.turn = self.turn.model_copy(update={"generated_ids": piece.token_ids})
                return [*begun, *self._close(piece.reason in INCOMPLETE), *self._note_end(piece)]
            case Used():
                return [*begun, *self._close(), *self._finish(piece)]
        return begun

    def _start(self) -> list[bytes]:
        self.response = self._head("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self.response) for kind in kinds]

    def _head(self, status: str) -> dict[str, Any]:
        return {
            "id": self.call.id, "object": "response", "created_at": self.created, "status": status,
            "model": self.call.model, "output": [], "error": None, "incomplete_details": None, "usage": None,
            "background": False, "truncation": "disabled", "prompt_cache_diagnostics": None,
            **self.call.options.get("echo", {}),
        }  # fmt: skip

    def _open(self, kind: str, **values: Any) -> list[bytes]:
        if self.is_open and self.output[-1]["type"] == kind != "function_call":
            return []
        events = self._close()
        place, suffix = len(self.output), self.call.id.split("_", 1)[-1]
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        if kind == "reasoning":
            item |= {"id": f"rs_{suffix}_{place}", "summary": [], "content": []}
        elif kind == "message":
            item |= {"id": f"msg_{suffix}_{place}", "role": "assistant", "content": []}
        else:
            item |= {"id": f"fc_{suffix}_{place}", "arguments": "", **values}
        self.output.append(item)
        self.is_open = True
        events.append(self._event("response.output_item.added", output_index=place, item=item))
        if kind != "function_call":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part)
            events.append(self._delta("response.content_part.added", content_index=0, part=part))
        return events

    def _delta(self, kind: str, **values: Any) -> bytes:
        return self._event(kind, item_id=self.output[-1]["id"], output_index=len(self.output) - 1, **values)

    def _say(self, text: str, logprobs: list[Any] | None = None) -> list[bytes]:
        part = self.output[-1]["content"][0]
        part["text"] += text
        if logprobs is None:
            return [self._delta("response.reasoning_text.delta", content_index=0, delta=text)] if text else []
        part["logprobs"] += logprobs
        return [self._delta("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def _logprobs(self, piece: Text) -> list[Any]:
        return chat_logprobs(self.model, piece.logprobs)["content"] if piece.logprobs else []

    def _close(self, is_incomplete: bool = False) -> list[bytes]:
        if not self.is_open:
            return []
        self.is_open, item = False, self.output[-1]
        item["status"] = "incomplete" if is_incomplete else "completed"
        events: list[bytes] = []
        if item["type"] == "function_call":
            events.append(self._delta("response.function_call_arguments.done", arguments=item["arguments"]))
            call = ToolCall.parse(item["name"], item["arguments"], item["call_id"])
            self.turn = self.turn.model_copy(update={"tool_calls": (*self.turn.tool_calls, call)})
        else:
            part = item["content"][0]
            if item["type"] == "message":
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                events.append(self._delta("response.output_text.done", content_index=0, **done))
                self.turn = self.turn.model_copy(update={"content": f"{self.turn.content}{part['text']}"})
            else:
                events.append(self._delta("response.reasoning_text.done", content_index=0, text=part["text"]))
                self.turn = self.turn.model_copy(update={"thinking": f"{self.turn.thinking or ''}{part['text']}"})
                if self.seal is not None:
                    item["encrypted_content"] = self.seal(part["text"])
            events.append(self._delta("response.content_part.done", content_index=0, part=part))
        return [*events, self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)]

    def _note_end(self, ended: Ended) -> list[bytes]:
        reason = INCOMPLETE.get(ended.reason)
        self.response |= {"status": "completed" if reason is None else "incomplete"}
        self.response["incomplete_details"] = None if reason is None else {"reason": reason}
        return []

    def _finish(self, used: Used) -> list[bytes]:
        status = "completed" if self.response["status"] == "in_progress" else self.response["status"]
        written = min(used.written_tokens, used.prompt_tokens - used.cached_tokens)
        long = min(written, sum(count for seconds, count in used.cache_written_by_ttl if seconds >= TWELVE_HOURS))
        lifetimes = {"ttl_12h_tokens": long, "ttl_30m_tokens": written - long}
        self.response |= {
            "status": status,
            "output": self.output,
            "completed_at": int(time.time()) if status == "completed" else None,
            "prompt_cache_diagnostics": cache_diagnostics(self.call, used.from_kept_answer),
            "usage": {
                "input_tokens": used.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": used.cached_tokens,
                    "cache_write_tokens": written,
                    "cache_write_tokens_details": lifetimes,
                },
                "output_tokens": used.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": used.thinking_tokens},
                "total_tokens": used.prompt_tokens + used.completion_tokens,
            },
        }
        self.finish(self.response, self.turn)
        return [self._event(f"response.{status}", response=self.response)]


def cache_diagnostics(call: Call, from_kept_answer: bool = False) -> dict[str, Any] | None:
    """Return why the prompt was not read from the cache, compared with the earlier response that the client named; None
    if it named none.
    """
    if not call.previous:
        return None
    if from_kept_answer:  # the prompt was not read
        return {"type": "unavailable", "workbench": {"kind": "kept_answer"}}
    miss = call.notes.get(CACHE_MISS)
    if not isinstance(miss, CacheMiss):
        return {"type": "cache_hit"}
    if miss.kind == "previous_not_found":
        return {"type": "comparison_response_not_found"}
    if miss.kind in ("evicted", "unavailable"):
        return {"type": "unavailable", "workbench": miss.as_values()}
    return {
        "type": "cache_miss",
        "reason": MISS_REASONS.get(miss.kind, "input_changed"),
        "cache_missed_tokens": miss.missed_tokens,
        "workbench": miss.as_values(),
    }
