"""Route requests with stateless routers, which choose among the instances that are up, and give the reason in words."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from workbench.errors import WorkbenchError, explain
from workbench.settings import Settings
from workbench.simulate.job import SimulatedRequest
from workbench.trace.events import RoutingOption


class InstanceView(Protocol):
    """The properties of an instance that a router sees; `pending_prompt_tokens` and `cached_tokens` are numbers of
    tokens."""

    @property
    def number(self) -> int: ...

    @property
    def num_requests(self) -> int: ...

    @property
    def pending_prompt_tokens(self) -> int: ...

    def cached_tokens(self, prompt: tuple[int, ...], tenant: str) -> int: ...


class RoundRobin(Settings):
    """Choose instances in turn."""

    kind: Literal["round_robin"] = "round_robin"

    def choose(self, job: SimulatedRequest, instances: Sequence[InstanceView]) -> InstanceView:
        return instances[(job.number + job.retries) % len(instances)]

    def reason(self, job: SimulatedRequest, chosen: InstanceView, instances: Sequence[InstanceView]) -> str:
        return f"in turn: request {job.number}" + f", sent {job.retries + 1} times" * (job.retries > 0)


class LeastLoaded(Settings):
    """Choose the instance with the fewest requests; among equals in turn."""

    kind: Literal["least_loaded"] = "least_loaded"

    def choose(self, job: SimulatedRequest, instances: Sequence[InstanceView]) -> InstanceView:
        turn = job.number + job.retries
        return min(instances, key=lambda view: (view.num_requests, (view.number - turn) % len(instances)))

    def reason(self, job: SimulatedRequest, chosen: InstanceView, instances: Sequence[InstanceView]) -> str:
        equal = sum(view.num_requests == chosen.num_requests for view in instances)
        return f"fewest requests: {chosen.num_requests}" + f", in turn among {equal} that have so many" * (equal > 1)


class PrefixAware(Settings):
    """Choose the instance with the fewest tokens to compute before the request's first token.

    Counts pending prompts and the request's own tokens that are not in the instance's cache. A running request counts
    as `request_tokens` (as in Preble, 2024; Mooncake, 2025)."""

    kind: Literal["prefix_aware"] = "prefix_aware"
    request_tokens: Annotated[int, Field(ge=0)] = 256

    def choose(self, job: SimulatedRequest, instances: Sequence[InstanceView]) -> InstanceView:
        return min(instances, key=lambda view: (self._tokens(job, view), view.number))

    def reason(self, job: SimulatedRequest, chosen: InstanceView, instances: Sequence[InstanceView]) -> str:
        cached = chosen.cached_tokens(job.prompt, job.arrival.tenant)
        running = f"{chosen.num_requests} requests at {self.request_tokens}"
        return (
            f"fewest tokens to compute first: {self._tokens(job, chosen)} ({job.num_tokens} of this request, "
            f"less {cached} cached; {chosen.pending_prompt_tokens} pending; {running})"
        )

    def _tokens(self, job: SimulatedRequest, view: InstanceView) -> int:
        cached = view.cached_tokens(job.prompt, job.arrival.tenant)
        return job.num_tokens - cached + view.pending_prompt_tokens + self.request_tokens * view.num_requests


class SessionSticky(Settings):
    """Send all requests of a session to the same instance while it is up.

    That is the instance with the highest hash with the session's name (rendezvous hashing, Thaler and Ravishankar,
    1998)."""

    kind: Literal["session_sticky"] = "session_sticky"

    def choose(self, job: SimulatedRequest, instances: Sequence[InstanceView]) -> InstanceView:
        session = job.arrival.session or job.name
        return max(instances, key=lambda view: (_hash_score(session, view.number), view.number))

    def reason(self, job: SimulatedRequest, chosen: InstanceView, instances: Sequence[InstanceView]) -> str:
        name = f"session {job.arrival.session!r}" if job.arrival.session else f"request {job.name!r}, without a session"
        return f"highest hash with {name}"


def routing_options(
    instances: Sequence[InstanceView], job: SimulatedRequest, first: int = 0
) -> tuple[RoutingOption, ...]:
    """Return a router's view of each instance for one request. `first` is added to an instance's number to get its
    number in a trace."""
    return tuple(
        RoutingOption(
            view.number + first, view.num_requests, view.pending_prompt_tokens,
            view.cached_tokens(job.prompt, job.arrival.tenant),
        )
        for view in instances
    )  # fmt: skip


def _hash_score(session: str, number: int) -> bytes:
    # Not a CRC: CRCs of two instances differ by the same bits for every session, so some would get most sessions.
    return hashlib.blake2b(f"{number}/{session}".encode(), digest_size=8).digest()


def _kind(value: object) -> object:
    return {"kind": value} if isinstance(value, str) else value


AnyRouter = RoundRobin | LeastLoaded | PrefixAware | SessionSticky
Router = Annotated[Annotated[AnyRouter, Field(discriminator="kind")], BeforeValidator(_kind)]
_ADAPTER: TypeAdapter[AnyRouter] = TypeAdapter(Router)


def router_from(value: object) -> AnyRouter:
    """Return a router, given as its kind, as a mapping of its settings, or as a router."""
    try:
        return _ADAPTER.validate_python(value)
    except ValidationError as error:
        kinds = "round_robin, least_loaded, prefix_aware, session_sticky"
        raise WorkbenchError(f"{explain(error, f'router {value!r}')}; known: {kinds}") from None
