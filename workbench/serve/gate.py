"""Define the gate: the only door between the server and what stands before it (`workbench.gateway`).

A server without a gateway has `OpenGate`: it refuses no caller and no call. The server calls `connect` once, `identify`
before it reads the body, `admit` before any work, hands every piece to the lease (those of a kept answer too), calls
the lease's `settle` exactly once, however the call ended, and at its own end `close`.
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
    """The end of a call, for accounts: `ended` is finished, cancelled, stopped (by moderation), failed or kept."""

    used: Used
    ended: str = "finished"
    seconds: float = 0.0
    first_token_seconds: float | None = None


class Lease(Protocol):
    """The admission of one call.

    Attributes:
        call: the call as it is to be carried out: its model may be another, its caller is set.
        headers: of the response: limits and what remains of them.
        answer: pieces of a kept answer, in place of the engine's; None where the engine is to answer.
        is_moderated: `take` may withhold text, which the call's trace then does not show either.
    """

    call: Call
    headers: Mapping[str, str]
    answer: tuple[Piece, ...] | None

    @property
    def is_moderated(self) -> bool: ...

    async def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces that may leave now; text is held back as far as a rule may still match.

        An `Ended` with the reason content_filter says that the answer is to be stopped: the server then cancels it.
        """
        ...

    async def settle(self, outcome: Outcome) -> None:
        """Give back what was reserved and not used, and enter the call in the accounts."""
        ...


class ModelCatalog(Protocol):
    """The models behind the server, as a gate may ask about them."""

    def names(self) -> Collection[str]:
        """Return the names under which calls are answered."""
        ...

    def fingerprint(self, model: str, tenant: str) -> str:
        """Return a text that differs where the same tokens may be answered differently: weights, backend, dtype.

        Empty where the tenant's calls themselves are: by one of several variants, as it happens."""
        ...

    def max_model_len(self, model: str) -> int:
        """Return the tokens of the model's context: prompt and answer."""
        ...

    def unavailable(self, model: str) -> str:
        """Return why the model takes no call now (overloaded, stopped); empty where it does."""
        ...

    async def prompt_ids(self, call: Call) -> tuple[tuple[int, ...], ...]:
        """Return the ids of each prompt as `call.model` would read them, computed outside of the event loop.

        Raises:
            ApiError: invalid_request_error where a prompt cannot be assembled.
        """
        ...

    async def decode(self, model: str, ids: Sequence[int]) -> str | None:
        """Return the text of token ids, with that of control tokens, computed outside of the event loop; None for a
        model without a tokenizer."""
        ...


class Gate(Protocol):
    def connect(self, models: ModelCatalog) -> None:
        """Learn of the models, before the first call.

        Raises:
            WorkbenchError: where the gate cannot stand before these models.
        """
        ...

    async def close(self) -> None:
        """Write what is not written yet and close files and connections, after the last call was settled."""
        ...

    async def identify(self, headers: Mapping[str, str]) -> Caller:
        """Return who asks, from the headers alone (`authorization`, `x-api-key`; names in lower case).

        Raises:
            ApiError: authentication_error for no key, a wrong one, or one that was revoked.
        """
        ...

    async def renew(self, caller: Caller) -> Caller:
        """Return a caller of an earlier request as the gate knows it now, for work that goes on without the client.

        Raises:
            ApiError: authentication_error where the key was revoked or has expired since.
        """
        ...

    async def admit(self, call: Call) -> Lease:
        """Admit a call with its caller set, or refuse it.

        Raises:
            ApiError: rate_limit_error, billing_error, permission_error, invalid_request_error, with headers.
        """
        ...

    def aliases(self) -> Collection[str]:
        """Return names that clients may give in place of a model's; `admit` chooses the model then."""
        ...

    def may_use(self, caller: Caller, model: str) -> bool:
        """Return whether a caller may use a model, as `admit` would find: what it may not use is not listed either."""
        ...

    def signing_key(self) -> bytes:
        """Return the secret key that thoughts are signed with; empty for one of this process."""
        ...

    def routes(self) -> Iterable[object]:
        """Return FastAPI routers of the gate's own (usage, keys)."""
        ...

    def meters(self) -> Iterable[Meter]:
        """Return limits and money with what is used of them, as known in memory; called in any thread."""
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
    """A gate that lets all through."""

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
