"""Describe the scheduler's decisions for one step: spans to compute, draft tokens, page transfers, reasons. Integers
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from workbench.display import Displayable, Table
from workbench.errors import WorkbenchError
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import NULL_PAGE, PageTransfers
from workbench.request import Sequence
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.policy import SchedulerDecision

MAX_SCORED_TOKENS = 128  # scored prompt tokens of a step: a whole prompt's logits may exceed the model's size


class Span(NamedTuple):
    """Consecutive tokens of one sequence that this step computes: positions [start, start + length)."""

    sequence: Sequence
    start: int
    length: int
    needs_sample: bool  # whether the last token's logits are needed, i.e. all known tokens are computed
    requested_logits: int | None = None  # number of last tokens with logits; None: 1 if it samples, else 0
    draft_token_ids: tuple[int, ...] = ()  # its last tokens, if they are proposed tokens
    draft_parents: tuple[int, ...] = ()  # for a tree: index of each draft token's parent; -1: the last known token

    @classmethod
    def next_tokens(cls, sequence: Sequence, length: int) -> Span:
        """Return the span of the next `length` tokens of `sequence`."""
        return cls(sequence, sequence.num_computed_tokens, length, needs_sample=length == sequence.num_new_tokens)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_known_tokens(self) -> int:
        """Return the number of computed tokens after the step, draft tokens excluded."""
        return self.end - len(self.draft_token_ids)

    @property
    def num_logits(self) -> int:
        return (
            int(self.needs_sample) + len(self.draft_token_ids)
            if self.requested_logits is None
            else self.requested_logits
        )

    @property
    def is_decode(self) -> bool:
        """Return whether the span computes one generated token and its draft tokens; all other spans are prefill."""
        return self.length == 1 + len(self.draft_token_ids) and self.start >= self.sequence.prompt_length

    @property
    def token_ids(self) -> list[int]:
        return [*self.sequence.token_ids[self.start : self.end - len(self.draft_token_ids)], *self.draft_token_ids]

    @property
    def as_row(self) -> tuple[object, ...]:
        """Return table cells: request, tokens, kind, draft tokens, logits, and current pages by cache group."""
        kind = "check" if self.draft_token_ids else "decode" if self.is_decode else "prefill"
        where = str(self.start) if self.length == 1 else f"{self.start} - {self.end - 1}"
        num_pages = ", ".join(str(sum(page != NULL_PAGE for page in pages)) for pages in self.sequence.pages)
        return self.sequence.request_id, where, kind, len(self.draft_token_ids) or "", self.num_logits or "", num_pages

    def as_decode_rows(self) -> list[Span]:
        """Split a decode with draft tokens into spans of one token; each reads the cache entries that the earlier ones
        write.
        """
        rows = enumerate(self.draft_token_ids, self.start + 1)
        return [
            Span(self.sequence, self.start, 1, self.needs_sample),
            *(Span(self.sequence, at, 1, True, requested_logits=1, draft_token_ids=(token,)) for at, token in rows),
        ]


def num_scored_rows(sequence: Sequence, start: int, length: int) -> int:
    """Return how many of the positions [start, start + length) give the log-probability of a prompt token. These are
    all positions except those that are already scored, and the prompt's last position, which gives the first token of
    the answer.
    """
    scored = sequence.num_scored_rows
    return 0 if scored is None else max(0, min(start + length, sequence.prompt_length - 1) - max(start, scored))


@dataclass(frozen=True)
class RequestDecision:
    """An action on a request, with its reason: admitted, waiting, cut, evicted, preempted or refused_decision."""

    request_id: str
    action: str
    reason: str


@dataclass(frozen=True)
class StepPlan(Displayable):
    """The plan of one step: the spans to compute, decodes (length 1) first, and the decisions that led to them."""

    step: int
    spans: tuple[Span, ...]
    decisions: tuple[RequestDecision, ...] = ()
    transfers: PageTransfers = field(default_factory=PageTransfers)  # executed before the forward pass
    errors: tuple[tuple[Sequence, str], ...] = ()  # sequences to fail, with their errors
    padding_rows: int = 0  # number of padding rows in a padded batch
    policy_decisions: tuple[SchedulerDecision, ...] = ()  # one per call of the policy: the walked order
    layers: tuple[int, ...] = ()  # layers with needed hidden states (executors/early_layers.py)
    only_largest: bool = False  # whether only the largest logit of each row is needed, so others may be left out

    def without(self, sequences: list[Sequence]) -> StepPlan:
        """Return the plan without the spans of `sequences`."""
        return replace(self, spans=tuple(span for span in self.spans if span.sequence not in sequences))

    def unfinished(self) -> StepPlan:
        """Return the plan without the spans of sequences that finished after planning (by cancellation, for
        example).
        """
        return self.without([span.sequence for span in self.spans if span.sequence.finish_reason is not None])

    def with_trees(self, parents: Mapping[str, tuple[int, ...]]) -> StepPlan:
        """Return the plan with drafts as trees; `parents` has, by request id, the parents of all proposed tokens."""
        spans = (
            span._replace(draft_parents=parents[name][: len(span.draft_token_ids)])
            if span.draft_token_ids and (name := span.sequence.request_id) in parents
            else span
            for span in self.spans
        )
        return replace(self, spans=tuple(spans))

    def split_in_half(self) -> tuple[StepPlan, StepPlan]:
        """Split the plan into two: the first half of its spans, at least one, and the remaining spans."""
        middle = max(1, len(self.spans) // 2)
        return replace(self, spans=self.spans[:middle]), replace(self, spans=self.spans[middle:])

    @property
    def num_draft_tokens(self) -> int:
        """Return the number of draft tokens that the step verifies."""
        return sum(len(span.draft_token_ids) for span in self.spans)

    def as_decode_rows(self, max_rows_per_sequence: int | None = None) -> StepPlan:
        """Return the plan with a separate row for each draft token, if it consists only of decodes and their drafts.

        Args:
            max_rows_per_sequence: maximum rows of one sequence; None: no limit. A plan beyond it is returned unchanged.
        """
        checks = [span for span in self.spans if span.length > 1]
        if not checks or any(span.length > 1 + len(span.draft_token_ids) for span in checks):
            return self
        if max_rows_per_sequence is not None and any(span.length > max_rows_per_sequence for span in checks):
            return self
        return replace(self, spans=tuple(row for span in self.spans for row in span.as_decode_rows()))

    @property
    def num_tokens(self) -> int:
        return sum(span.length for span in self.spans)

    @property
    def decode_only(self) -> bool:
        """Return whether every sequence computes one token."""
        return all(span.length == 1 for span in self.spans)

    @property
    def phase(self) -> str:
        decodes = sum(span.is_decode for span in self.spans)
        return "decode" if decodes == len(self.spans) else "mixed" if decodes else "prefill"

    @property
    def prefill_tokens(self) -> int:
        return sum(span.length for span in self.spans if not span.is_decode)

    @property
    def decode_tokens(self) -> int:
        return self.num_tokens - self.prefill_tokens

    def _display_table(self) -> Table:
        counts = f"{self.prefill_tokens} of prefill, {self.decode_tokens} of decode"
        decisions = [(each.request_id, each.action, each.reason) for each in self.decisions]
        ended = [(sequence.request_id, "ends with an error", parts) for sequence, parts in self.errors]
        moves = {"evictions": self.transfers.evictions, "pages saved": self.transfers.swap_outs,
                 "pages copied": self.transfers.copies, "pages loaded": self.transfers.swap_ins}  # fmt: skip
        parts = [f"{len(which)} {name}" for name, which in moves.items() if which]
        parts += [f"{self.padding_rows} rows of padding"] * bool(self.padding_rows)
        return Table(
            f"step {self.step}: {self.phase}, {self.num_tokens} tokens ({counts})",
            [span.as_row for span in self.spans],
            ("request", "tokens", "kind", "drafted", "logits", "pages now"),
            ", ".join(parts),
            subtables=(Table("decisions", decisions + ended, ("request", "action", "why")),)
            if decisions or ended
            else (),
        )


class RequestRefused(WorkbenchError):
    """Raised for a request that can never run; the message has the numbers."""


def check_request_fits(
    sequence: Sequence,
    kv_cache_manager: KVCacheManager,
    limits: SchedulerLimits,
    max_model_len: int,
    num_beams: int = 0,
    second: Sequence | None = None,
) -> None:
    """Check that a sequence can run with no other requests, together with its `num_beams` beams or its second stream.

    Raises:
        RequestRefused: with the numbers and the setting to change.
    """
    name, prompt, most = sequence.request_id, sequence.prompt_length, sequence.request.sampling.max_output_tokens
    if prompt + 1 > max_model_len:
        raise RequestRefused(
            f"request {name}: {prompt} prompt tokens leave no room in a context of {max_model_len}; "
            "shorten the prompt or set overflow: cut_oldest"
        )
    if not limits.chunked_prefill and prompt > limits.max_num_batched_tokens:
        raise RequestRefused(
            f"request {name}: {prompt} prompt tokens do not fit into one step of {limits.max_num_batched_tokens}; "
            "raise max_num_batched_tokens or switch chunked_prefill on"
        )
    scored = sequence.prompt_logprobs is not None and prompt > MAX_SCORED_TOKENS
    if scored and not limits.chunked_prefill:
        raise RequestRefused(
            f"request {name}: prompt_logprobs of {prompt} prompt tokens need steps of {MAX_SCORED_TOKENS}; switch "
            "chunked_prefill on"
        )
    if num_beams > limits.max_num_seqs:
        raise RequestRefused(
            f"request {name}: {num_beams} beams, and max_num_seqs is {limits.max_num_seqs}; raise it or ask for fewer "
            "beams"
        )
    if num_beams and kv_cache_manager.budget is not None:
        raise RequestRefused(f"request {name}: beams share pages, and cache.evict moves tokens within pages")
    # The last token is never read back, so its keys and values need no page.
    needed = kv_cache_manager.peak_pages(min(prompt + most, max_model_len) - 1, prompt, max(1, num_beams))
    if second is not None:
        if limits.max_num_seqs < 2 or kv_cache_manager.budget is not None:
            why = "max_num_seqs is 1; raise it" if limits.max_num_seqs < 2 else "cache.evict drops other tokens in each"
            raise RequestRefused(f"request {name}: its second stream is another sequence, and {why}")
        check_request_fits(second, kv_cache_manager, limits, max_model_len)
        tokens = min(second.prompt_length + most, max_model_len) - 1
        more = kv_cache_manager.peak_pages(tokens, second.prompt_length)
        needed = [first + others for first, others in zip(needed, more, strict=True)]
    for group, pages, pool in zip(kv_cache_manager.groups, needed, kv_cache_manager.pools, strict=True):
        if pages > pool.num_pages:
            window = group.sliding_window
            layers = "" if window is None else f" at once in layers that see {window}"
            layers = " for states at once" if group.is_recurrent else layers
            several = f", in {num_beams} beams," if num_beams > 1 else ", and its second stream," if second else ""
            raise RequestRefused(
                f"request {name}: {prompt} prompt tokens and up to {most} more{several} need {pages} pages of "
                f"{pool.page_size} tokens{layers}, the cache has {pool.num_pages}; lower max_tokens or raise "
                "cache.pages"
            )


def check_still_fits(
    sequence: Sequence, kv_cache_manager: KVCacheManager, limits: SchedulerLimits, max_model_len: int
) -> None:
    """Check that a sequence which was submitted under other limits can run under `limits`.

    Raises:
        WorkbenchError: with the numbers.
    """
    second = next((each for each in sequence.beams if each.own_prompt), None)
    num_beams = 0 if second is not None else len(sequence.beams)
    try:
        check_request_fits(sequence, kv_cache_manager, limits, max_model_len, num_beams, second)
    except RequestRefused as error:
        raise WorkbenchError(f"limits cannot change while a request needs the present ones: {error}") from None


def add_drafts(
    spans: tuple[Span, ...],
    proposed: Mapping[str, tuple[int, ...]],
    kv_cache_manager: KVCacheManager,
    max_num_batched_tokens: int,
) -> tuple[Span, ...]:
    """Add proposed draft tokens to `spans`, as many as `max_num_batched_tokens` and free pages allow; they never cause
    a preemption. Only the decode of a sequence's last token gets draft tokens, since they follow that token.
    """
    left = max_num_batched_tokens - sum(span.length for span in spans)
    single, checks, longer = [], [], []
    for span in spans:
        follows = span.is_decode and span.needs_sample and not span.sequence.beams
        drafts = proposed.get(span.sequence.request_id, ())[: max(0, left)] if follows else ()
        while drafts and (missing := kv_cache_manager.pages_to_allocate(span.sequence, len(drafts))) is not None:
            if kv_cache_manager.first_exhausted_group(missing) is None:
                kv_cache_manager.allocate(span.sequence, len(drafts))
                break
            drafts = drafts[:-1]
        left -= len(drafts)
        if drafts:
            span = span._replace(length=span.length + len(drafts), draft_token_ids=drafts)
        (checks if drafts else longer if span.length > 1 else single).append(span)
    return (*single, *checks, *longer)
