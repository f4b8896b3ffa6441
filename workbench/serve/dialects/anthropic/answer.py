"""Write answers in the shape of Anthropic's Messages: as events, one block after the other, or whole.

    message_start  ( content_block_start  content_block_delta ...  content_block_stop ) ...  message_delta  message_stop

A block is a thought, a text, or a tool call; a new block begins when the kind of pieces changes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.prompt.answers import parse_partial_json
from workbench.prompt.cache_miss import CacheMiss
from workbench.serve.answers.pieces import (
    Ended,
    EndReason,
    Piece,
    PromptRead,
    Text,
    Thought,
    ToolArguments,
    ToolCallBegun,
    Used,
)
from workbench.serve.call import Call
from workbench.serve.dialects.thought_signature import ThoughtSigner
from workbench.serve.json_bytes import dumps

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
STOP_REASONS: dict[EndReason, str] = {
    "stop": "end_turn",
    "stop_sequence": "stop_sequence",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
    "cancelled": "pause_turn",
}
HOUR = 3600.0
HIDES_THOUGHTS = "hides_thoughts"  # name in the options of a call
CACHE_MISS = "cache_miss"  # name in the notes of a call


def event(kind: str, **values: Any) -> bytes:
    """Return one server-sent event as bytes. It has the line `event:`, without which clients drop it."""
    return b"event: " + kind.encode() + b"\ndata: " + dumps({"type": kind, **values}) + b"\n\n"


@dataclass
class MessageWriter:
    """The writer of one streamed message. `write` takes pieces in their order and returns events as bytes."""

    call: Call
    signer: ThoughtSigner
    block: dict[str, Any] | None = None  # the open block, as it began
    index: int = -1  # index of the latest block
    thought: list[str] = field(default_factory=list)  # pieces of the open block's thought
    ended: Ended | None = None
    started: bool = False

    def write(self, pieces: Sequence[Piece]) -> bytes:
        return b"".join(part for piece in pieces for part in self._events(piece))

    def _events(self, piece: Piece) -> list[bytes]:
        match piece:
            case PromptRead():
                return self._start(piece)
            case _ if not self.started:
                return [*self._start(PromptRead()), *self._events(piece)]
            case Used():
                return [*self._close(), *self._finish(piece)]
            case Ended():
                self.ended = piece
                return []
            case _ if self.call.only_warms:
                return []
            case Text(text=text) if text:
                return [*self._open({"type": "text", "text": ""}), self._delta(type="text_delta", text=text)]
            case Thought(text=text):
                opened = self._open({"type": "thinking", "thinking": "", "signature": ""})
                self.thought.append(text)
                shown = text and not self.call.options.get(HIDES_THOUGHTS)
                return [*opened, *([self._delta(type="thinking_delta", thinking=text)] if shown else [])]
            case ToolCallBegun():
                begun = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
                return [*self._close(), *self._open(begun), self._delta(type="input_json_delta", partial_json="")]
            case ToolArguments(text=text) if text:
                return [self._delta(type="input_json_delta", partial_json=text)]
        return []

    def _start(self, read: PromptRead) -> list[bytes]:
        if self.started:
            return []
        self.started = True
        message = {**message_head(self.call), "usage": input_usage(self.call, read) | {"output_tokens": 0}}
        return [event("message_start", message=message), PING]

    def _open(self, block: dict[str, Any]) -> list[bytes]:
        """Begin a block, unless a block of its kind is open; a tool call always begins a block."""
        if self.block is not None and self.block["type"] == block["type"] != "tool_use":
            return []
        closed = self._close()
        self.block, self.index = block, self.index + 1
        return [*closed, event("content_block_start", index=self.index, content_block=block)]

    def _delta(self, **delta: Any) -> bytes:
        return event("content_block_delta", index=self.index, delta=delta)

    def _close(self) -> list[bytes]:
        if self.block is None:
            return []
        block, self.block = self.block, None
        events = [event("content_block_stop", index=self.index)]
        if block["type"] == "thinking":
            signature = sign_thought(self.call, self.signer, self.index, "".join(self.thought))
            self.thought.clear()
            events.insert(0, self._delta(type="signature_delta", signature=signature))
        return events

    def _finish(self, used: Used) -> list[bytes]:
        usage = output_usage(self.call, used) | input_usage(self.call, used)
        return [event("message_delta", delta=stop_fields(self.ended), usage=usage), event("message_stop")]


def whole_message(call: Call, signer: ThoughtSigner, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return the JSON of a message from all of its pieces."""
    content: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}  # by index of the call's block
    used, ended = Used(), None
    for piece in pieces:
        last = content[-1] if content else {"type": ""}
        match piece:
            case Text(text=text) if text:
                if last["type"] == "text":
                    last["text"] += text
                else:
                    content.append({"type": "text", "text": text})
            case Thought(text=text):
                if last["type"] == "thinking":
                    last["thinking"] += text
                else:
                    content.append({"type": "thinking", "thinking": text, "signature": ""})
            case ToolCallBegun():
                arguments[len(content)] = ""
                content.append({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
            case ToolArguments(text=text):
                arguments[len(content) - 1] += text
            case Ended():
                ended = piece
            case Used():
                used = piece
    for place, text in arguments.items():
        content[place]["input"] = _arguments(text)
    for place, block in enumerate(content):
        if block["type"] == "thinking":
            block["signature"] = sign_thought(call, signer, place, block["thinking"])
            block["thinking"] = "" if call.options.get(HIDES_THOUGHTS) else block["thinking"]
    usage = input_usage(call, used) | output_usage(call, used)
    shown = [] if call.only_warms else content
    return {**message_head(call), "content": shown, **stop_fields(ended), "usage": usage}


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; of a truncated call, the complete arguments."""
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        found = parse_partial_json(text)
    return found if isinstance(found, dict) else {}


def sign_thought(call: Call, signer: ThoughtSigner, place: int, thought: str) -> str:
    write = signer.seal if call.options.get(HIDES_THOUGHTS) else signer.sign
    return write(call.model, place, thought)


def message_head(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "diagnostics": diagnostics(call),
    }


def diagnostics(call: Call) -> dict[str, Any] | None:
    """Return the reason why the prompt was not read from the cache, if the client asked for it; else None.

    The protocol has no word for evicted pages: the reason is then `unavailable`. Our own fields are added.
    """
    if not call.previous:
        return None
    miss = call.notes.get(CACHE_MISS)
    if not isinstance(miss, CacheMiss):
        return {"cache_miss_reason": None}
    if miss.kind == "previous_not_found":
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    if miss.kind in ("evicted", "unavailable"):
        return {"cache_miss_reason": {"type": "unavailable", "workbench": miss.as_values()}}
    reason = {"type": miss.kind, "cache_missed_input_tokens": miss.missed_tokens, "workbench": miss.as_values()}
    return {"cache_miss_reason": reason}


def stop_fields(ended: Ended | None) -> dict[str, Any]:
    reason = STOP_REASONS[ended.reason] if ended is not None else None
    stop = ended.stop if ended is not None and ended.reason == "stop_sequence" else None
    if reason == "stop_sequence" and not isinstance(stop, str):
        reason, stop = "end_turn", None  # ended by a stop token, which the protocol does not know
    refusal = {"type": "refusal", "category": None, "explanation": "stopped by a rule of the server"}
    return {
        "stop_reason": reason,
        "stop_sequence": stop,
        "stop_details": refusal if reason == "refusal" else None,
    }


def input_usage(call: Call, tokens: PromptRead | Used) -> dict[str, Any]:
    """Return the usage of the prompt. Its `input_tokens` are the tokens neither read from the cache nor written to it
    up to a breakpoint.
    """
    cached = tokens.cached_tokens
    written = min(tokens.written_tokens, tokens.prompt_tokens - cached) if call.breakpoints else 0
    hours = min(written, sum(count for seconds, count in tokens.cache_written_by_ttl if seconds >= HOUR))
    if not tokens.cache_written_by_ttl and call.breakpoints and min(b.seconds for b in call.breakpoints) >= HOUR:
        hours = written
    return {
        "input_tokens": max(0, tokens.prompt_tokens - cached - written),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "cache_creation": {"ephemeral_5m_input_tokens": written - hours, "ephemeral_1h_input_tokens": hours},
    }


def output_usage(call: Call, used: Used) -> dict[str, Any]:
    warms = call.only_warms  # one token is generated but not shown
    return {
        "output_tokens": 0 if warms else used.completion_tokens,
        "output_tokens_details": {"thinking_tokens": 0 if warms else used.thinking_tokens},
    }
