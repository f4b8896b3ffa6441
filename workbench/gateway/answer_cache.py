"""Cache complete responses: for identical calls, and optionally for questions with the same meaning.

Pieces are stored, so a response can be replayed in every protocol, streamed or not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import secrets
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from workbench.custom import load_custom
from workbench.errors import WorkbenchError, describe_error
from workbench.gateway.answer_store import MemoryAnswers, RedisAnswers
from workbench.gateway.router import last_message
from workbench.gateway.similarity import cosine, facts_differ, unit
from workbench.gateway.work_threads import WorkThreads
from workbench.prompt.conversation import Conversation
from workbench.request import CustomPart
from workbench.serve.answers import pieces as kinds
from workbench.serve.answers.pieces import Ended, Failed, Piece, TokenLogprob, ToolCallBegun, Used
from workbench.serve.call import Call, PromptInput
from workbench.settings import Count, Settings

LOG = logging.getLogger(__name__)
PIECES: dict[str, type[Piece]] = {
    each.__name__: each
    for each in (kinds.PromptRead, kinds.Text, kinds.Thought, ToolCallBegun, kinds.ToolArguments, Ended, Used)
}
WHOLE = ("stop", "stop_sequence", "length", "tool_calls")  # finish reasons of complete answers
Seconds = Annotated[float, Field(gt=0)]
STATIC_VECTORS = CustomPart(path="workbench.gateway.static_vectors:StaticVectors")
# Fields of a call that are not part of the cache key, with the reason. All other fields are, later additions included.
NOT_IN_KEY = {
    "id": "names the call",
    "dialect": "the pieces of an answer are kept, and each protocol writes them in its own form",
    "prompts": "their token ids are in the key, and the conversation as far as the answer depends on it",
    "sampling": "is in the key; its seed only if the answer depends on the seed",
    "has_max_tokens": "the number itself is in the key",
    "has_seed": "the seed itself is in the key, and other sampled answers are not kept",
    "stream": "the same pieces are written at once or one after another",
    "breakpoints": "a call with breakpoints does not use the cache",
    "only_warms": "a call that only warms the prefix cache does not use this cache",
    "previous": "explains what was read from the cache, and changes no token",
    "priority": "changes only the time of the answer",
    "deadline": "changes only the time of the answer",
    "background": "changes only the time of the answer",
    "caller": "is in the key as the salt of the tenant",
    "ignored": "fields that have no effect",
    "options": "shape the written form of the pieces",
    "notes": "are for the trace",
}


class SemanticConfig(Settings):
    """Reuse the response to a question with the same meaning: similar embeddings, and equal facts in both questions."""

    embedding: CustomPart = STATIC_VECTORS  # function: texts -> one vector each
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.9  # minimum cosine similarity
    second_gate: bool = True  # also compare numbers, names, negations, opposites and code
    candidates: Count = 256  # number of newest questions to compare, of one tenant and kind
    seconds: Seconds = 2.0  # seconds for embedding and comparison; after that the question counts as new


class AnswerCacheConfig(Settings):
    """Settings of the response cache, in memory or in Redis."""

    exact: bool = True
    semantic: SemanticConfig | None = None
    ttl_seconds: Seconds = 3600.0
    max_bytes: Count = 64 << 20  # maximum bytes of answers in memory; Redis has its own limit (maxmemory)
    redis: str | None = None  # redis://host:port/database; None: answers stay in this process

    @model_validator(mode="after")
    def _some(self) -> AnswerCacheConfig:
        if not self.exact and self.semantic is None:
            raise ValueError("neither exact nor semantic answers are kept: leave the group out")
        return self


class AnswerCache:
    """A cache of responses.

    Args:
        config: what is cached, where and for how long.
        store: the storage; default: by `config`.
    """

    def __init__(self, config: AnswerCacheConfig, store: MemoryAnswers | RedisAnswers | None = None):
        self.config = config
        self._store = store or (RedisAnswers(config.redis) if config.redis else MemoryAnswers(config.max_bytes))
        self._embed = load_custom(config.semantic.embedding) if config.semantic else None
        self._threads = WorkThreads()
        self.hits = {"exact": 0, "semantic": 0}
        self.misses = 0

    async def find(
        self, call: Call, fingerprint: str, prompt_ids: Sequence[Sequence[int]]
    ) -> tuple[tuple[Piece, ...] | None, str]:
        """Return (pieces of a cached response, or None; the reason). An error only causes a miss."""
        if why := passes_by(call):
            return None, why
        try:
            kept = await self._store.get(exact_key(call, fingerprint, prompt_ids)) if self.config.exact else None
            if kept is not None:
                pieces, why = await asyncio.to_thread(_replayed, kept), "exact"
            else:
                pieces, why = await self._find_similar(call, fingerprint, prompt_ids)
        except Exception as error:
            LOG.warning("kept answers: call %s passes by: %s", call.id, describe_error(error))
            pieces, why = None, f"failed: {describe_error(error)}"
        if pieces is None:
            self.misses += 1
        else:
            self.hits[why.partition(":")[0]] += 1
        return pieces, why or "not kept"

    async def keep(
        self, call: Call, fingerprint: str, prompt_ids: Sequence[Sequence[int]], pieces: Sequence[Piece]
    ) -> bool:
        """Store a response if it is complete and may be reused; return whether it was stored."""
        if passes_by(call) or not is_whole(call, pieces):
            return False
        try:
            value = await asyncio.to_thread(write_pieces, pieces)
            if self.config.exact:
                await self._store.put(exact_key(call, fingerprint, prompt_ids), value, self.config.ttl_seconds)
            if self.config.semantic is not None and (asked := _question(call)):
                await self._keep_similar(self.config.semantic, asked, semantic_key(call, fingerprint), value)
        except Exception as error:
            LOG.warning("kept answers: that of call %s is not kept: %s", call.id, describe_error(error))
            return False
        return True

    async def close(self) -> None:
        await self._store.close()

    async def _find_similar(
        self, call: Call, fingerprint: str, prompt_ids: Sequence[Sequence[int]]
    ) -> tuple[tuple[Piece, ...] | None, str]:
        semantic, asked = self.config.semantic, _question(call)
        if semantic is None or not asked:
            return None, ""
        group = semantic_key(call, fingerprint)
        if (kept := await self._store.get(group)) is None:
            return None, ""
        near, why = await self._threads.run(lambda: self._nearest(semantic, asked, json.loads(kept)), semantic.seconds)
        for score, id, question in near:
            if (answer := await self._store.get(f"{group}:{id}")) is not None:
                pieces = await asyncio.to_thread(_replayed, answer)
                return with_prompt(pieces, prompt_ids[0]), f"semantic: {score:.3f} to {question!r}"
        return None, why

    def _nearest(
        self, semantic: SemanticConfig, asked: str, rows: Sequence[Any]
    ) -> tuple[list[tuple[float, str, str]], str]:
        """Return (score, id, question) of the questions that may share a response, and why the nearest other question
        may not.
        """
        here = self._vector(asked)
        scored = sorted(((cosine(here, array("f", bytes.fromhex(row[2]))), row) for row in rows), reverse=True)
        near, why = [], ""
        for score, (id, question, _) in scored:
            if score < semantic.threshold:
                break
            differs = facts_differ(asked, question) if semantic.second_gate else ""
            if differs:
                why = why or f"similar ({score:.3f}) to {question!r}, but {differs}"
            else:
                near.append((score, id, question))
        return near, why

    async def _keep_similar(self, semantic: SemanticConfig, asked: str, group: str, value: bytes) -> None:
        id, seconds = secrets.token_hex(8), self.config.ttl_seconds
        vector = await self._threads.run(lambda: self._vector(asked), semantic.seconds)
        await self._store.put(f"{group}:{id}", value, seconds)
        rows = [row for row in json.loads(await self._store.get(group) or b"[]") if row[1] != asked]
        rows.append([id, asked, array("f", vector).tobytes().hex()])
        await self._store.put(group, json.dumps(rows[-semantic.candidates :]).encode(), seconds)

    def _vector(self, text: str) -> tuple[float, ...]:
        assert self._embed is not None
        vectors = self._embed([text])
        if len(vectors) != 1:
            raise WorkbenchError(f"answers.semantic.embedding: {len(vectors)} vectors for one text; return one of each")
        return unit(vectors[0])


def passes_by(call: Call) -> str:
    """Return why a call bypasses the cache; empty if it does not."""
    if call.only_warms:
        return "it only reads its prompt into the cache"
    if call.breakpoints:
        return "it keeps a prefix in the cache"
    return "" if call.is_seeded else "sampled without a seed"


def is_whole(call: Call, pieces: Sequence[Piece]) -> bool:
    """Return whether a response is complete: no choice was cut, stopped or failed, and its usage is known."""
    ends = {each.choice: each.reason for each in pieces if isinstance(each, Ended)}
    complete = len(ends) == call.num_choices and all(reason in WHOLE for reason in ends.values())
    used = bool(pieces) and isinstance(pieces[-1], Used) and not any(isinstance(each, Failed) for each in pieces)
    return complete and used


def exact_key(call: Call, fingerprint: str, prompt_ids: Sequence[Sequence[int]]) -> str:
    """Return the cache key of a call, a hash of all fields that determine the response."""
    ids = [hashlib.sha256(array("q", each).tobytes()).hexdigest() for each in prompt_ids]
    return _hashed(call, fingerprint, [ids, [_reading(each) for each in call.prompts]])


def semantic_key(call: Call, fingerprint: str) -> str:
    """Return the cache key that a call shares with all calls that differ only in the last user message."""
    before = [
        prompt.model_copy(update={"turns": prompt.turns[:-1]}).model_dump(mode="json")
        for prompt in call.prompts
        if isinstance(prompt, Conversation)
    ]
    return "similar:" + _hashed(call, fingerprint, before)


def _question(call: Call) -> str:
    """Return the last message of a call with a single conversation; empty for other calls."""
    (prompt, *others) = call.prompts
    ends = isinstance(prompt, Conversation) and prompt.turns and prompt.turns[-1].role == "user"
    return last_message(prompt) if ends and not others and call.prompt_logprobs is None and not call.echo else ""


def _reading(prompt: PromptInput) -> object:
    """Return the inputs of parsing a response besides the prompt's ids: a conversation's tools and template."""
    if not isinstance(prompt, Conversation):
        return None
    return prompt.model_dump(mode="json", exclude={"system", "documents", "turns"})


def _hashed(call: Call, fingerprint: str, prompts: object) -> str:
    has_no_draws = call.sampling.temperature == 0 or call.sampling.beams
    sampling = call.sampling.model_dump(mode="json", exclude={"seed"} if has_no_draws else set())
    plain = {each.name: getattr(call, each.name) for each in dataclasses.fields(call) if each.name not in NOT_IN_KEY}
    # Keys stay in order: a schema's properties are generated in this order.
    whole = json.dumps([fingerprint, call.caller.cache_salt, prompts, sampling, plain])
    return hashlib.sha256(whole.encode()).hexdigest()


def replayed(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Return a cached response with new ids for its tool calls, and a usage that marks it as cached."""
    ids: dict[str, str] = {}
    found: list[Piece] = []
    for each in pieces:
        if isinstance(each, ToolCallBegun):
            prefix, _, _ = each.id.partition("_")
            new = ids.setdefault(each.id, f"{prefix or 'call'}_{secrets.token_hex(12)}")
            found.append(dataclasses.replace(each, id=new))
        else:
            found.append(dataclasses.replace(each, from_kept_answer=True) if isinstance(each, Used) else each)
    return tuple(found)


def _replayed(value: bytes) -> tuple[Piece, ...]:
    return replayed(read_pieces(value))


def with_prompt(pieces: Sequence[Piece], ids: Sequence[int]) -> tuple[Piece, ...]:
    """Return the cached response for another question, with the usage of its prompt `ids`: no token counts as read from
    the prefix cache.
    """
    read = {"prompt_tokens": len(ids), "cached_tokens": 0}
    found: list[Piece] = []
    for each in pieces:
        if isinstance(each, kinds.PromptRead):
            found.append(dataclasses.replace(each, token_ids=tuple(ids), **read))
        else:
            found.append(dataclasses.replace(each, **read) if isinstance(each, Used) else each)
    return tuple(found)


def write_pieces(pieces: Sequence[Piece]) -> bytes:
    """Serialize pieces as JSON."""
    return json.dumps(
        [
            [type(piece).__name__, {each.name: getattr(piece, each.name) for each in dataclasses.fields(piece)}]
            for piece in pieces
        ]
    ).encode()


def read_pieces(value: bytes) -> tuple[Piece, ...]:
    """Parse the pieces that `write_pieces` serialized."""
    return tuple(_read(PIECES[name], values) for name, values in json.loads(value))


def _read(kind: type[Piece], values: Mapping[str, Any]) -> Piece:
    read: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}
    if "logprobs" in read:
        read["logprobs"] = tuple(TokenLogprob(id, own, tuple(map(tuple, top))) for id, own, top in read["logprobs"])
    if "cache_written_by_ttl" in read:
        read["cache_written_by_ttl"] = tuple(map(tuple, read["cache_written_by_ttl"]))
    return kind(**read)
