"""Define the gate: the only interface between the server and a gateway (`workbench.gateway`), which may refuse calls.

A server without a gateway has `OpenGate`, which refuses no caller and no call. The server calls `connect` once,
`identify` before it reads the body, and `admit` before any work; it passes every piece to the lease (of cached answers
too), calls the lease's `settle` exactly once, however the call ended, and calls `close` at its own end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from workbench.serve.answers.pieces import Piece, Used
from workbench.serve.call import ADMIN, Call, Caller
from workbench.serve.watch.snapshot import Meter


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call, for accounts. `ended` is finished, cancelled, stopped (by moderation), failed or kept
    (answered from the response cache).
    """

    used: Used
    ended: str = "finished"
    seconds: float = 0.0
    first_token_seconds: float | None = None


class Lease(Protocol):
    """The admission of one call by the gate, which the server settles at the end of the call.

    Attributes:
        call: the call to run: its model may have changed, its caller is set.
        headers: headers of the response: limits and their remainders.
        answer: pieces of a cached answer, which replace the engine's; None if the engine answers.
        is_moderated: `take` may withhold text, which the call's trace then hides too.
    """

    call: Call
    headers: Mapping[str, str]
    answer: tuple[Piece, ...] | None

    @property
    def is_moderated(self) -> bool: ...

    async def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces that may be sent now; text is held back while a rule may still match it.

        On an `Ended` with the reason content_filter, the server cancels the answer.
        """
        ...

    async def settle(self, outcome: Outcome) -> None:
        """Release the unused part of the reservation, and enter the call in the accounts."""
        ...


class ModelCatalog(Protocol):
    """The models behind the server, as visible to a gate."""

    def names(self) -> Collection[str]:
        """Return the names of the served models."""
        ...

    def fingerprint(self, model: str, tenant: str) -> str:
        """Return a text that identifies weights, backend and dtype: models that may answer the same tokens differently
        have different texts.

        Empty if several variants answer the tenant's calls."""
        ...

    def max_model_len(self, model: str) -> int:
        """Return the length of the model's context in tokens: prompt and answer."""
        ...

    def unavailable(self, model: str) -> str:
        """Return why the model takes no call now (overloaded, stopped); empty if it does."""
        ...

    async def prompt_ids(self, call: Call) -> tuple[tuple[int, ...], ...]:
        """Return the ids of each prompt as read by `call.model`, computed outside of the event loop.

        Raises:
            ApiError: invalid_request_error if a prompt cannot be assembled.
        """
        ...

    async def decode(self, model: str, ids: Sequence[int]) -> str | None:
        """Return the text of token ids, including control tokens, computed outside of the event loop; None for a model
        without a tokenizer."""
        ...


class Gate(Protocol):
    def connect(self, models: ModelCatalog) -> None:
        """Receive the models, before the first call.

        Raises:
            WorkbenchError: if the gate does not work with these models.
        """
        ...

    async def close(self) -> None:
        """Flush, and close files and connections, after the last call was settled."""
        ...

    async def identify(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller, from the headers alone (`authorization`, `x-api-key`; names in lower case).

        Raises:
            ApiError: authentication_error for a missing, wrong or revoked key.
        """
        ...

    async def renew(self, caller: Caller) -> Caller:
        """Return the present rights of a caller that was identified earlier, for work that continues without the
        client.

        Raises:
            ApiError: authentication_error if the key was revoked or has expired since.
        """
        ...

    async def admit(self, call: Call) -> Lease:
        """Admit a call with its caller set, or refuse it.

        Raises:
            ApiError: rate_limit_error, billing_error, permission_error, invalid_request_error, with headers.
        """
        ...

    def aliases(self) -> Collection[str]:
        """Return names that clients may give instead of a model's name; `admit` then chooses the model."""
        ...

    def may_use(self, caller: Caller, model: str) -> bool:
        """Return whether a caller may use a model, consistent with `admit`. The caller does not see other models in
        lists.
        """
        ...

    def signing_key(self) -> bytes:
        """Return the secret key for signing thoughts; empty for a random key of this process."""
        ...

    def routes(self) -> Iterable[object]:
        """Return the gate's own FastAPI routers (usage, keys)."""
        ...

    def meters(self) -> Iterable[Meter]:
        """Return a meter for each limit and for money, with their current use, read from memory; may be called in any
        thread.
        """
        ...


@dataclass
class OpenLease:
    call: Call
    headers: Mapping[str, str] = field(default_factory=dict)
    answer: tuple[Piece, ...] | None = None
    is_moderated: bool = False

    async def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        return list(pieces)

    async def settle(self, outcome: Outcome) -> None:
        pass


class OpenGate:
    """A gate that admits all callers and calls."""

    def connect(self, models: ModelCatalog) -> None:
        pass

    async def close(self) -> None:
        pass

    async def identify(self, headers: Mapping[str, str]) -> Caller:
        return Caller(scopes=frozenset({"*", ADMIN}))

    async def renew(self, caller: Caller) -> Caller:
        return caller

    async def admit(self, call: Call) -> Lease:
        return OpenLease(call)

    def aliases(self) -> Collection[str]:
        return ()

    def may_use(self, caller: Caller, model: str) -> bool:
        return True

    def signing_key(self) -> bytes:
        return b""

    def routes(self) -> Iterable[object]:
        return ()

    def meters(self) -> Iterable[Meter]:
        return ()
