"""Keep responses by id, to continue, read again or delete them. Bounded in bytes and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.prompt.turns import AssistantTurn, ResultTurn, UserTurn
from workbench.serve.errors import ApiError
from workbench.serve.json_bytes import dumps
from workbench.serve.memory.generated_turns import BYTES_PER_CHARACTER, BYTES_PER_TOKEN, ENTRY_BYTES
from workbench.serve.memory.tenant_store import TenantStore

AnyTurn = UserTurn | AssistantTurn | ResultTurn


@dataclass(frozen=True)
class StoredResponse:
    """A response with its conversation.

    Args:
        tenant: the owner; no other tenant finds it.
        system: texts of system items in the input, without instructions, which are not inherited.
        turns: all turns up to and including its answer, with the generated tokens.
        response: the response as sent.
        input_items: items of its own input.
    """

    tenant: str
    system: tuple[str, ...]
    turns: tuple[AnyTurn, ...]
    response: dict[str, Any]
    input_items: list[dict[str, Any]]


class ResponseStore:
    """Responses of all tenants, by id.

    Args:
        max_bytes: maximum bytes of all responses with their turns; a tenant has at most a quarter.
        seconds: lifetime after the last use.
    """

    def __init__(self, max_bytes: int = 256 << 20, seconds: float = 30 * 86400.0):
        self._kept: TenantStore[StoredResponse] = TenantStore(max_bytes, max_bytes // 4, seconds)

    def keep(self, stored: StoredResponse) -> None:
        """Keep a response, unless it is larger than the bytes that one tenant may use."""
        self._kept.put(stored.tenant, stored.response["id"], stored, _count_bytes(stored))

    def get(self, id: str, tenant: str, param: str = "response_id") -> StoredResponse:
        """Return a tenant's response.

        Raises:
            ApiError: not_found_error, also for another tenant's.
        """
        found = self._kept.get(tenant, id)
        if found is None:
            words = f"{param}: no response {id[:80]!r} is kept; it was deleted, was not stored, or is too old"
            raise ApiError("not_found_error", words, param, "response_not_found")
        return found

    def delete(self, id: str, tenant: str) -> None:
        """Delete a tenant's response (ApiError as for `get`)."""
        self.get(id, tenant)
        self._kept.remove(tenant, id)


def _count_bytes(stored: StoredResponse) -> int:
    """Return the approximate memory of a response in bytes; turns shared with earlier responses count again."""
    sent = len(dumps((stored.response, stored.input_items)))
    characters = sum(map(len, stored.system))
    tokens = 0
    for turn in stored.turns:
        characters += len(turn.content)
        if isinstance(turn, AssistantTurn):
            characters += len(turn.thinking or "") + sum(len(str(each.arguments)) for each in turn.tool_calls)
            tokens += len(turn.generated_ids)
    return sent + BYTES_PER_CHARACTER * characters + BYTES_PER_TOKEN * tokens + ENTRY_BYTES
