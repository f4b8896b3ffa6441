"""Keep whole answers: for the very same call, and, where that is switched on, for a question of the same meaning.

What is kept are pieces, so that an answer can be replayed in either protocol, streamed or whole.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field, model_validator

from workbench.custom import load_custom
from workbench.errors import WorkbenchError, describe_error
from workbench.gateway.answer_store import AnswerStore, MemoryAnswers, RedisAnswers
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
Result = TypeVar("Result")
BYTES_PER_PIECE = 120  # as JSON, about
BYTES_ON_LOOP = 1 << 16  # of pieces that are read or written in the event loop: about a millisecond
PIECES: dict[str, type[Piece]] = {
    each.__name__: each
    for each in (kinds.PromptRead, kinds.Text, kinds.Thought, ToolCallBegun, kinds.ToolArguments, Ended, Used)
}
WHOLE = ("stop", "stop_sequence", "length", "tool_calls")  # ends of choices that are complete answers
Seconds = Annotated[float, Field(gt=0)]
# Fields of a call that are not in the keys of its answer, and why. Every other field is, also one that is added later.
NOT_IN_KEY = {
    "id": "names the call",
    "dialect": "pieces are kept, and each protocol writes them in its own way",
    "prompts": "are in the key as the ids that are read, with all of a conversation by which its answer is read",
    "sampling": "is in the key, without the seed of an answer that does not depend on it",
    "has_max_tokens": "the number itself is in the key",
    "has_seed": "the seed itself is in the key, and other sampled answers are not kept",
    "stream": "the same pieces are written at once or one after another",
    "breakpoints": "a call that has some passes by",
    "only_warms": "such a call passes by",
    "previous": "explains what was read from the cache, and changes no token",
    "priority": "changes the time of the answer alone",
    "deadline": "changes the time of the answer alone",
    "background": "changes the time of the answer alone",
    "caller": "is in the key as the salt of the tenant",
    "ignored": "fields that have no effect",
    "options": "shape what is written of the pieces",
    "notes": "are for the trace",
}


class SemanticConfig(Settings):
    """Answer a question by that of one with the same meaning: an embedding, then the facts of both compared."""

    embedding: CustomPart  # a function: texts -> a vector of each
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.9  # cosine
    second_gate: bool = True  # compare numbers, names, negations, opposites and code
    candidates: Count = 256  # questions compared, the newest of one tenant and kind
    seconds: Seconds = 2.0  # for the embedding and the comparison; then the question counts as a new one


class AnswerCacheConfig(Settings):
    """Keep answers, in memory or in Redis."""

    exact: bool = True
    semantic: SemanticConfig | None = None
    ttl_seconds: Seconds = 3600.0
    max_bytes: Count = 64 << 20  # in memory; Redis has a bound of its own (maxmemory)
    redis: str | None = None  # redis://host:port/database

    @model_validator(mode="after")
    def _some(self) -> AnswerCacheConfig:
        if not self.exact and self.semantic is None:
            raise ValueError("neither exact nor semantic answers are kept: leave the group out")
        return self


class AnswerCache:
    """Find and keep answers.

    Args:
        config: what is kept, where and for how long.
        store: where; as `config` says unless given.
    """

    def __init__(self, config: AnswerCacheConfig, store: AnswerStore | None = None):
        self.config = config
        self._store = store or (RedisAnswers(config.redis) if config.redis else MemoryAnswers(config.max_bytes))
        self._embed = load_custom(config.semantic.embedding) if config.semantic else None
        self._threads = WorkThreads()
        self.hits = {"exact": 0, "semantic": 0}
        self.misses = 0

    async def find(
        self, call: Call, fingerprint: str, prompt_ids: Sequence[Sequence[int]]
    ) -> tuple[tuple[Piece, ...] | None, str]:
        """Return the pieces of a kept answer, or None, and why. An error costs the hit alone."""
        if why := passes_by(call):
            return None, why
        try:
            return await self._find(call, fingerprint, prompt_ids)
        except Exception as error:
            LOG.warning("kept answers: call %s passes by: %s", call.id, describe_error(error))
            self.misses += 1
            return None, f"failed: {describe_error(error)}"

    async def _find(
        self, call: Call, fingerprint: str, prompt_ids: Sequence[Sequence[int]]
    ) -> tuple[tuple[Piece, ...] | None, str]:
        if self.config.exact and (kept := await self._store.get(exact_key(call, fingerprint, prompt_ids))) is not None:
            found = await _beside_loop(lambda: replayed(read_pieces(kept)), len(kept))
            self.hits["exact"] += 1
            return found, "exact"
        near, why = await self._find_similar(call, fingerprint, prompt_ids)
        if near is not None:
            self.hits["semantic"] += 1
            return near, why
        self.misses += 1
        return None, why or "not kept"

    async def keep(
        self, call: Call, fingerprint: str, prompt_ids: Sequence[Sequence[int]], pieces: Sequence[Piece]
    ) -> bool:
        """Keep an answer if it is whole and may stand for later ones; return whether it was kept."""
        if passes_by(call) or not is_whole(call, pieces):
            return False
        try:
            value = await _beside_loop(lambda: write_pieces(pieces), len(pieces) * BYTES_PER_PIECE)
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
                found = await _beside_loop(lambda answer=answer: replayed(read_pieces(answer)), len(answer))
                return with_prompt(found, prompt_ids[0]), f"semantic: {score:.3f} to {question!r}"
        return None, why

    def _nearest(
        self, semantic: SemanticConfig, asked: str, rows: Sequence[Any]
    ) -> tuple[list[tuple[float, str, str]], str]:
        """Return (score, id, question) of the questions that may share an answer, and why the nearest other may not."""
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


async def _beside_loop(function: Callable[[], Result], num_bytes: int) -> Result:
    """Return `function()`, which reads or writes so many bytes of pieces: many of them in a thread."""
    return function() if num_bytes <= BYTES_ON_LOOP else await asyncio.to_thread(function)


def passes_by(call: Call) -> str:
    """Return why no kept answer is looked for and none is kept; empty where both may be."""
    if call.only_warms:
        return "it only reads its prompt into the cache"
    if call.breakpoints:
        return "it keeps a prefix in the cache"
    return "" if call.is_seeded else "sampled without a seed"


def is_whole(call: Call, pieces: Sequence[Piece]) -> bool:
    """Return whether an answer is complete: no choice was cut, stopped or failed, and its usage is known."""
    ends = {each.choice: each.reason for each in pieces if isinstance(each, Ended)}
    complete = len(ends) == call.num_choices and all(reason in WHOLE for reason in ends.values())
    used = bool(pieces) and isinstance(pieces[-1], Used) and not any(isinstance(each, Failed) for each in pieces)
    return complete and used


def exact_key(call: Call, fingerprint: str, prompt_ids: Sequence[Sequence[int]]) -> str:
    """Return the key of everything that decides an answer."""
    ids = [hashlib.sha256(array("q", each).tobytes()).hexdigest() for each in prompt_ids]
    return _hashed(call, fingerprint, [ids, [_reading(each) for each in call.prompts]])


def semantic_key(call: Call, fingerprint: str) -> str:
    """Return the key of everything that decides an answer but the last message of the user's."""
    before = [
        prompt.model_copy(update={"turns": prompt.turns[:-1]}).model_dump(mode="json")
        for prompt in call.prompts
        if isinstance(prompt, Conversation)
    ]
    return "similar:" + _hashed(call, fingerprint, before)


def _question(call: Call) -> str:
    """Return the last message of the only conversation; empty where the call is something else."""
    (prompt, *others) = call.prompts
    ends = isinstance(prompt, Conversation) and prompt.turns and prompt.turns[-1].role == "user"
    return last_message(prompt) if ends and not others and call.prompt_logprobs is None and not call.echo else ""


def _reading(prompt: PromptInput) -> object:
    """Return what decides, besides a prompt's ids, how its answer is read: of a conversation its tools and template."""
    if not isinstance(prompt, Conversation):
        return None
    return prompt.model_dump(mode="json", exclude={"system", "documents", "turns"})


def _hashed(call: Call, fingerprint: str, prompts: object) -> str:
    has_no_draws = call.sampling.temperature == 0 or call.sampling.beams
    sampling = call.sampling.model_dump(mode="json", exclude={"seed"} if has_no_draws else set())
    plain = {each.name: getattr(call, each.name) for each in dataclasses.fields(call) if each.name not in NOT_IN_KEY}
    # Keys stay in their order: a schema's properties are generated in it.
    whole = json.dumps([fingerprint, call.caller.cache_salt, prompts, sampling, plain])
    return hashlib.sha256(whole.encode()).hexdigest()


def replayed(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Return a kept answer as one of today: its calls of tools have new ids, its usage says where it comes from."""
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


def with_prompt(pieces: Sequence[Piece], ids: Sequence[int]) -> tuple[Piece, ...]:
    """Return the answer to another question as one to the prompt `ids`: with its tokens, of which none was cached."""
    read = {"prompt_tokens": len(ids), "cached_tokens": 0}
    found: list[Piece] = []
    for each in pieces:
        if isinstance(each, kinds.PromptRead):
            found.append(dataclasses.replace(each, token_ids=tuple(ids), **read))
        else:
            found.append(dataclasses.replace(each, **read) if isinstance(each, Used) else each)
    return tuple(found)


def write_pieces(pieces: Sequence[Piece]) -> bytes:
    """Return pieces as JSON."""
    return json.dumps([[type(each).__name__, _fields(each)] for each in pieces]).encode()


def read_pieces(value: bytes) -> tuple[Piece, ...]:
    """Return the pieces that `write_pieces` wrote."""
    return tuple(_read(PIECES[name], values) for name, values in json.loads(value))


def _fields(piece: Piece) -> dict[str, Any]:
    return {each.name: getattr(piece, each.name) for each in dataclasses.fields(piece)}


def _read(kind: type[Piece], values: Mapping[str, Any]) -> Piece:
    read: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}
    if "logprobs" in read:
        read["logprobs"] = tuple(TokenLogprob(id, own, tuple(map(tuple, top))) for id, own, top in read["logprobs"])
    if "cache_written_by_ttl" in read:
        read["cache_written_by_ttl"] = tuple(map(tuple, read["cache_written_by_ttl"]))
    return kind(**read)
