"""Limit what runs at once, and refuse what can never run."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.cache.holdings import Holdings
from workbench.errors import WorkbenchError
from workbench.request import Sequence


class Refusal(WorkbenchError):
    """A request that can never run; the message has the numbers."""


@dataclass(frozen=True)
class Limits:
    max_num_seqs: int = 16  # sequences that run at once
    max_num_batched_tokens: int = 512  # tokens a step computes at most
    chunk_tokens: int | None = None  # of these, tokens of prefill at most; None: all
    chunked_prefill: bool = True  # a prefill may be cut where the step's tokens end

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < 1:
            raise WorkbenchError("max_num_seqs and max_num_batched_tokens must be at least 1")
        if self.chunk_tokens is not None and not 1 <= self.chunk_tokens <= self.max_num_batched_tokens:
            within = f"max_num_batched_tokens ({self.max_num_batched_tokens})"
            raise WorkbenchError(f"chunk_tokens must be within 1 and {within}, not {self.chunk_tokens}")
        if self.chunk_tokens is not None and not self.chunked_prefill:
            raise WorkbenchError("chunk_tokens has no meaning where chunked_prefill is off; leave one of them out")

    @property
    def chunk(self) -> int:
        return self.chunk_tokens or self.max_num_batched_tokens


def check_fits(sequence: Sequence, holdings: Holdings, limits: Limits, context: int, beams: int = 0) -> None:
    """Check that a sequence can run alone, or with all `num_beams` of its search.

    Raises:
        Refusal: with the numbers and what to change.
    """
    name, prompt, most = sequence.request_id, sequence.prompt_length, sequence.request.sampling.max_tokens
    if prompt + 1 > context:
        raise Refusal(
            f"request {name}: {prompt} prompt tokens leave no room in a context of {context}; shorten the prompt or "
            "set overflow: cut_oldest"
        )
    if not limits.chunked_prefill and prompt > limits.max_num_batched_tokens:
        raise Refusal(
            f"request {name}: {prompt} prompt tokens do not fit into one step of {limits.max_num_batched_tokens}; "
            "raise max_num_batched_tokens or switch chunked_prefill on"
        )
    if beams > limits.max_num_seqs:
        raise Refusal(
            f"request {name}: {beams} beams, and max_num_seqs is {limits.max_num_seqs}; raise it or ask for fewer "
            "beams"
        )
    if beams and holdings.budget is not None:
        raise Refusal(f"request {name}: beams share pages, and cache.evict moves what is in them")
    # The last token is never read back, so its keys and values need no page.
    needed = holdings.at_once(min(prompt + most, context) - 1, prompt, max(1, beams))
    for table, (pages, pool) in enumerate(zip(needed, holdings.pools, strict=True)):
        if pages > pool.pages:
            back = holdings.tables[table].back
            seen = "" if back is None else f" at once in layers that see {back}"
            several = f", in {beams} beams," if beams > 1 else ""
            raise Refusal(
                f"request {name}: {prompt} prompt tokens and up to {most} more{several} need {pages} pages of "
                f"{pool.page_size} tokens{seen}, the cache has {pool.pages}; lower max_tokens or raise cache.pages"
            )
