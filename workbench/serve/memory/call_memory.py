"""Remember prompts and answers by tenant, to restore tokens, pin prefixes and explain cache misses.

prepare:  answers as generated -> prompt -> breakpoints -> pins of the request
read:     pins that were made, tokens that were cached -> what was written -> why an earlier prompt was missed
ended:    the answer is kept
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from workbench.prompt.answers import parse_answer
from workbench.prompt.cache_miss import PromptSeen, explain_miss
from workbench.prompt.turns import AssistantTurn, ToolCall
from workbench.serve.answers.pieces import Ended, Piece, PromptRead, Text, ToolArguments, ToolCallBegun
from workbench.serve.call import Call
from workbench.serve.memory.generated_turns import BYTES_PER_CHARACTER, BYTES_PER_TOKEN, GeneratedTurns, answer_name
from workbench.serve.memory.prompt_cache import describe_pins
from workbench.serve.memory.tenant_store import TenantStore
from workbench.serve.served_model import PreparedPrompt, ServedModel


class CallMemory:
    """The memory of a server's calls, for all its models.

    Args:
        max_bytes: maximum bytes of prompts, and the same for answers.
        seconds: lifetime after the last use.
    """

    def __init__(self, max_bytes: int = 64 * 2**20, seconds: float = 3600.0):
        share = max_bytes // 4
        self._prompts: TenantStore[PromptSeen] = TenantStore(max_bytes, share, seconds)
        self.turns = GeneratedTurns(TenantStore(max_bytes, share, seconds))

    def keep_prompt(self, tenant: str, call_id: str, seen: PromptSeen) -> None:
        """Keep the prompt of a call."""
        text = "" if seen.prompt is None else seen.prompt.text
        # Its segments hold tokens and text a second time.
        size = 2 * (BYTES_PER_TOKEN * len(seen.token_ids) + BYTES_PER_CHARACTER * len(text)) + 256
        self._prompts.put(tenant, call_id, seen, size)

    def prompt(self, tenant: str, call_id: str) -> PromptSeen | None:
        """Return the prompt of an earlier call of the same tenant, if it is kept."""
        return self._prompts.get(tenant, call_id)


@dataclass
class _ShownChoice:
    text: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # (id, name, JSON of the arguments)


class CallRecorder:
    """A recorder of one call: it stores prompts and answers in the server's memory of calls, and adds notes to the
    call.

    `notes["prompt_cache"]` has the breakpoints of each prompt with the tokens kept for them; `notes["cache_miss"]` why
    the prompt of the named earlier call was not read from the cache, and the cost.
    """

    def __init__(self, memory: CallMemory, call: Call, model: ServedModel, prepared: Sequence[PreparedPrompt]):
        self._memory, self._call, self._model, self._prepared = memory, call, model, prepared
        self._shown: dict[int, _ShownChoice] = {}

    def take(self, pieces: Iterable[Piece]) -> None:
        """Record the next pieces of the call's answers, in the order in which the server sends them."""
        for piece in pieces:
            shown = self._shown.setdefault(piece.choice, _ShownChoice())
            if isinstance(piece, PromptRead):
                self._read(piece)
            elif isinstance(piece, Text):
                shown.text += piece.text
            elif isinstance(piece, ToolCallBegun):
                shown.calls.append((piece.id, piece.name, ""))
            elif isinstance(piece, ToolArguments):
                id, name, arguments = shown.calls[piece.index]
                shown.calls[piece.index] = id, name, arguments + piece.text
            elif isinstance(piece, Ended):
                self._end(piece, shown)

    def _read(self, read: PromptRead) -> None:
        call, prepared = self._call, self._prepared[read.choice // self._call.sampling.n]
        page_size = self._model.page_size
        if prepared.breakpoints:
            done = describe_pins(prepared.breakpoints, read.pinned, read.cached_tokens, page_size)
            call.notes.setdefault("prompt_cache", []).append(done)
        if read.choice:  # only the first prompt is compared, and kept under the call's id
            return
        tenant, pinned = call.caller.tenant, max((each.kept for each in read.pinned), default=0)
        seen = PromptSeen(self._model.name, prepared.request.prompt_ids, prepared.prompt, pinned)
        if call.previous:
            earlier = self._memory.prompt(tenant, call.previous)
            pace = self._model.seconds_per_prefill_token
            miss = explain_miss(earlier, seen, read.cached_tokens, page_size, pace)
            if miss is not None:
                call.notes["cache_miss"] = miss
        self._memory.keep_prompt(tenant, call.id, seen)

    def _end(self, ended: Ended, shown: _ShownChoice) -> None:
        place = ended.choice // self._call.sampling.n
        prepared = self._prepared[place]
        # An answer ended by a stop string was generated with the string, but is shown without it.
        is_cut = ended.reason in ("cancelled", "content_filter") or isinstance(ended.stop, str)
        is_cut = is_cut or (prepared.conversation is not None and prepared.conversation.continues)
        if is_cut or prepared.conversation is None or prepared.format is None or self._model.tokenizer is None:
            return
        if not ended.token_ids:
            return
        calls = tuple(ToolCall.parse(name, arguments, id) for id, name, arguments in shown.calls)
        ids = list(ended.token_ids)
        ends = prepared.request.sampling.stop_token_ids
        spoken = ids[:-1] if ids[-1] in ends else ids
        before = prepared.request.prompt_ids
        made = parse_answer(spoken, self._model.tokenizer, prepared.format, prepared.in_thought, before)
        if len(made.tool_calls) != len(calls):
            return
        made = made.model_copy(update={"generated_ids": tuple(ids)})
        turn = AssistantTurn(content=shown.text, tool_calls=calls)
        name = answer_name(self._call.id, ended.choice)
        self._memory.turns.keep(self._call.caller.tenant, self._model.name, prepared.conversation, turn, made, name)
