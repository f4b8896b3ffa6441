"""Present a fleet to routers as the simulator does: replicas as instances, requests as jobs."""

from __future__ import annotations

from dataclasses import dataclass, field

from workbench.cluster.fleet_request import FleetRequest, prompt_of
from workbench.cluster.prefixes import PrefixGuess
from workbench.cluster.replica import PageCounts, Replica
from workbench.request import Request
from workbench.simulate.arrival import Arrival
from workbench.simulate.job import SimulatedRequest


@dataclass(eq=False)
class ReplicaView:
    """A replica as seen by the front and by routers (`simulate.routers.InstanceView`)."""

    handle: Replica
    variant: str
    prefixes: PrefixGuess
    requests: dict[str, FleetRequest] = field(default_factory=dict)
    names: dict[str, tuple[FleetRequest, int | None]] = field(default_factory=dict)  # (request, sample) by sent id
    pages: PageCounts = PageCounts()
    is_leaving: bool = False

    @property
    def number(self) -> int:
        return self.handle.number

    @property
    def num_requests(self) -> int:
        return sum(len(each.unfinished) for each in self.requests.values())

    @property
    def pending_prompt_tokens(self) -> int:
        return sum(each.pending_tokens for each in self.requests.values())

    def cached_tokens(self, prompt: tuple[int, ...], tenant: str) -> int:
        """Return the estimated number of a prompt's tokens cached by this replica under the salt `tenant`."""
        return self.prefixes.num_tokens(prompt, tenant)


def as_job(each: FleetRequest, request: Request) -> SimulatedRequest:
    """Return a request in the form that routers take: lengths, prompt, salt of the prefix cache, and tenant of the
    session.
    """
    prompt = prompt_of(request)
    arrival = Arrival(
        each.arrival, len(prompt), request.sampling.max_output_tokens, session=request.tenant, tenant=request.cache_salt
    )
    job = SimulatedRequest(each.order, each.name, arrival, 0, request.sampling.max_output_tokens, prompt=prompt)
    job.generated_tokens, job.retries = len(request.generated_ids), each.losses
    return job
