"""Track one request through a fleet. Times are ticks of the simulated clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from workbench.simulate.arrival import Arrival


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """A request for `output_tokens` tokens on its way through a fleet. It has `generated_tokens` so far, and moves on
    from its present instance at `tokens_on_instance` generated tokens."""

    number: int
    name: str
    arrival: Arrival
    arrival_time: int
    output_tokens: int
    prompt: tuple[int, ...] = field(default=(), repr=False)  # token ids; dropped when the request ends
    generated_tokens: int = 0
    tokens_on_instance: int = 0
    first_scheduled: int | None = None
    first_token: int | None = None
    last_token: int = 0
    longest_gap: int = 0
    finish_time: int | None = None
    error: str = ""
    cached_tokens: int = 0
    computed_tokens: int = 0
    written_tokens: int = 0
    num_preemptions: int = 0
    retries: int = 0
    instances: list[int] = field(default_factory=list)  # the instances it was sent to

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens so far, of prompt and output together."""
        return self.arrival.prompt_tokens + self.generated_tokens

    def add_tokens(self, count: int, first: int, longest: int, last: int) -> None:
        """Add `count` tokens: the first one at tick `first`, the last one at tick `last`, with gaps of at most
        `longest` ticks."""
        if self.first_token is None:
            self.first_token = first
        else:
            self.longest_gap = max(self.longest_gap, first - self.last_token)
        if count > 1:
            self.longest_gap = max(self.longest_gap, longest)
        self.generated_tokens += count
        self.last_token = last


def symbolic_prompt(arrival: Arrival, number: int) -> tuple[int, ...]:
    """Return a prompt of symbolic tokens, for a prefix cache that only compares them: a token is the name of its block,
    or unique to the request."""
    if not arrival.blocks:
        return (-number - 1,) * arrival.prompt_tokens
    ids: list[int] = []
    for block in arrival.blocks:
        ids += [block] * arrival.block_tokens
    return tuple(ids[: arrival.prompt_tokens])
