"""Remember answers as generated, and restore their tokens when a client sends them back as text.

A client sends back the text that it was shown. Encoded again, an answer may have other tokens than generated, and a
client may leave out the thought: the cached prefix would end there. So each answer is stored by the conversation before
it and by its shown text, and is restored whole: its tokens, and the thought before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterator

from workbench.prompt.conversation import Conversation
from workbench.prompt.turns import AssistantTurn, ResultTurn, UserTurn
from workbench.serve.memory.tenant_store import TenantStore

AnyTurn = UserTurn | AssistantTurn | ResultTurn
BYTES_PER_TOKEN, BYTES_PER_CHARACTER, ENTRY_BYTES = 40, 4, 512  # approximate memory of Python objects


class GeneratedTurns:
    """A store of answers by tenant. An answer is found by the text that a client sends back, or by the id of
    its call.
    """

    def __init__(self, store: TenantStore[AssistantTurn | str]):
        self._store = store

    def keep(
        self, tenant: str, model: str, conversation: Conversation, shown: AssistantTurn, made: AssistantTurn, name: str
    ) -> None:
        """Store an answer, with its tokens, under the conversation before it and its shown text.

        Args:
            tenant: its owner.
            model: the model that generated it.
            conversation: the conversation before it, with or without tokens.
            shown: its text and calls as shown to the client.
            made: the turn as the model generated it, with its tokens.
            name: name of the answer, `call_id` or `call_id.choice`.
        """
        before = list(_digests(model, conversation))[-1]
        said = [made.thinking or "", made.content, *(str(each.arguments) for each in made.tool_calls)]
        size = BYTES_PER_TOKEN * len(made.generated_ids) + BYTES_PER_CHARACTER * sum(map(len, said)) + ENTRY_BYTES
        self._store.put(tenant, name, made, size)
        self._store.put(tenant, _next(before, shown), name, ENTRY_BYTES)
        for call in shown.tool_calls if shown.tool_calls and shown.tool_calls[0].id else ():
            self._store.put(tenant, (_next(before, shown), call.id), name, ENTRY_BYTES)

    def get(self, tenant: str, call_id: str, choice: int = 0) -> AssistantTurn | None:
        """Return an answer by the id of its call, if it is kept."""
        return self._find(tenant, answer_name(call_id, choice))

    def _find(self, tenant: str, key: Hashable) -> AssistantTurn | None:
        """Return an answer by its name, or by a key that maps to its name."""
        found = self._store.get(tenant, key)
        if isinstance(found, str):
            found = self._store.get(tenant, found)
        return found if isinstance(found, AssistantTurn) else None

    def fill(self, tenant: str, model: str, conversation: Conversation) -> Conversation:
        """Return the conversation with each answer that is stored here replaced by the turn as generated, with its
        tokens.
        """
        turns: list[AnyTurn] = list(conversation.turns)
        digests = list(_digests(model, conversation))
        for number, turn in enumerate(turns):
            if not isinstance(turn, AssistantTurn) or turn.generated_ids:
                continue
            key = digests[number + 1]
            named = [(key, call.id) for call in turn.tool_calls[:1]]
            made = next((found for each in (*named, key) if (found := self._find(tenant, each)) is not None), None)
            if made is None or turn.thinking not in (None, "", made.thinking):
                continue
            calls = zip(made.tool_calls, turn.tool_calls, strict=True)
            own = tuple(kept.model_copy(update={"id": sent.id}) for kept, sent in calls)
            turns[number] = made.model_copy(update={"tool_calls": own})
        return conversation.model_copy(update={"turns": tuple(turns)})


def answer_name(call_id: str, choice: int) -> str:
    return f"{call_id}.{choice}" if choice else call_id


def _digests(model: str, conversation: Conversation) -> Iterator[bytes]:
    """Yield a digest of the part before the first turn, and of every longer prefix of turns."""
    tools = [tool.declaration() for tool in conversation.tools]
    documents = [each.model_dump(exclude_unset=True) for each in conversation.documents]
    digest = _digest(b"", [model, conversation.system, tools, documents])
    yield digest
    for turn in conversation.turns:
        digest = _next(digest, turn)
        yield digest


def _next(before: bytes, turn: AnyTurn) -> bytes:
    """Return the digest after one more turn; an answer's thought is ignored, since clients may leave it out."""
    values: list[object] = [turn.role, turn.content]
    if isinstance(turn, AssistantTurn):
        values = [turn.role, turn.content, [[call.name, call.arguments] for call in turn.tool_calls]]
    return _digest(before, values)


def _digest(before: bytes, values: object) -> bytes:
    text = json.dumps(values, ensure_ascii=True, sort_keys=True, default=str)
    return hashlib.blake2b(before + text.encode(), digest_size=20).digest()
