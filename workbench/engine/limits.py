"""Limit what runs at once, and refuse what can never run."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.cache.holdings import KVCacheManager
from workbench.errors import WorkbenchError
from workbench.request import Sequence


class RequestRefused(WorkbenchError):
    """A request that can never run; the message has the numbers."""


@dataclass(frozen=True)
class SchedulerLimits:
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
    def max_prefill_tokens(self) -> int:
        return self.chunk_tokens or self.max_num_batched_tokens


def check_request_fits(sequence: Sequence, kv_cache_manager: KVCacheManager, limits: SchedulerLimits, max_model_len: int, num_beams: int = 0) -> None:
    """Check that a sequence can run alone, or with all `num_beams` of its search.

    Raises:
        Refusal: with the numbers and what to change.
    """
    name, prompt, most = sequence.request_id, sequence.prompt_length, sequence.request.sampling.max_tokens
    if prompt + 1 > max_model_len:
        raise RequestRefused(
            f"request {name}: {prompt} prompt tokens leave no room in a context of {max_model_len}; shorten the prompt or "
            "set overflow: cut_oldest"
        )
    if not limits.chunked_prefill and prompt > limits.max_num_batched_tokens:
        raise RequestRefused(
            f"request {name}: {prompt} prompt tokens do not fit into one step of {limits.max_num_batched_tokens}; "
            "raise max_num_batched_tokens or switch chunked_prefill on"
        )
    if num_beams > limits.max_num_seqs:
        raise RequestRefused(
            f"request {name}: {num_beams} beams, and max_num_seqs is {limits.max_num_seqs}; raise it or ask for fewer "
            "beams"
        )
    if num_beams and kv_cache_manager.budget is not None:
        raise RequestRefused(f"request {name}: beams share pages, and cache.evict moves what is in them")
    # The last token is never read back, so its keys and values need no page.
    needed = kv_cache_manager.peak_pages(min(prompt + most, max_model_len) - 1, prompt, max(1, num_beams))
    for table, (pages, pool) in enumerate(zip(needed, kv_cache_manager.pools, strict=True)):
        if pages > pool.num_pages:
            back = kv_cache_manager.groups[table].sliding_window
            seen = "" if back is None else f" at once in layers that see {back}"
            several = f", in {num_beams} beams," if num_beams > 1 else ""
            raise RequestRefused(
                f"request {name}: {prompt} prompt tokens and up to {most} more{several} need {pages} pages of "
                f"{pool.page_size} tokens{seen}, the cache has {pool.num_pages}; lower max_tokens or raise cache.pages"
            )
