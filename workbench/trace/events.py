"""Define the events of a run: the runner yields them, the recorder stores them. Standard library only.

Times are seconds on the runner's clock (`time.perf_counter`), never rounded. Every event has `text`, so that
`print(event.text, end="")` streams a generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from workbench.display import Displayable, Table


@dataclass(frozen=True, slots=True)
class Event:
    kind: ClassVar[str] = "event"
    time: float
    request_id: str = ""  # empty for events of a whole step
    text: str = ""
    sample: int = 0  # index of the sample, of the request's `n`
    replica: int = 0  # number in a cluster, counted from 1; 0: a single engine


class PromptLogprob(NamedTuple):
    """A token of a prompt with its log-probability given the tokens before it (None for the first token), and the
    likeliest tokens at its position with theirs.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class PinnedPrefix(NamedTuple):
    """A prefix of a prompt to pin in the prefix cache for `seconds`: `tokens` is the requested length, `kept` the
    pinned length, in whole pages and within the limit on pinned pages.
    """

    tokens: int
    seconds: float
    kept: int


@dataclass(frozen=True, slots=True)
class Submitted(Event):
    kind: ClassVar[str] = "submitted"
    prompt_tokens: int = 0
    arrival: float = 0.0
    cut_tokens: int = 0
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None  # seconds from its arrival
    generated_tokens: int = 0  # tokens sampled earlier by another engine; they are not emitted again


@dataclass(frozen=True, slots=True)
class Scheduled(Event):
    """One decision of the scheduler: `action` is admitted, waiting, cut, evicted or refused_decision."""

    kind: ClassVar[str] = "scheduled"
    step: int = 0
    action: str = ""
    reason: str = ""


class RecordedDecision(NamedTuple):
    """The part of a policy's decision that the scheduler used (see `scheduler.policy.SchedulerDecision`)."""

    order: tuple[tuple[str, int | None], ...]  # sequences, each with its token limit (None: no limit)
    keep: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()


class SpanRecord(NamedTuple):
    """The tokens of one sequence that a step computes: [start, start + tokens), of which the last `drafted` are draft
    tokens.

    `sequence` is the request's id, with `#n` for its sample n.
    """

    sequence: str
    start: int
    tokens: int
    drafted: int = 0


@dataclass(frozen=True, slots=True)
class StepPlanned(Event):
    """The plan of a step: spans in packed order, and the policy's decisions. `time` is when the step began."""

    kind: ClassVar[str] = "step_planned"
    step: int = 0
    spans: tuple[SpanRecord, ...] = ()
    policy_decisions: tuple[RecordedDecision, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancelled(Event):
    """A cancellation of a request in any state; Finished follows for each unfinished sample."""

    kind: ClassVar[str] = "cancelled"


@dataclass(frozen=True, slots=True)
class Prefilled(Event):
    """A prefill chunk: `tokens` prompt tokens were computed, `computed` are in the cache now.

    `logprobs` are the log-probabilities of the prompt's next tokens, if requested. The chunks of a request together
    have one for each token of its prompt, in order, before its first `Decoded`. `pinned` are the request's pins that
    this chunk reached.
    """

    kind: ClassVar[str] = "prefilled"
    step: int = 0
    tokens: int = 0
    computed: int = 0
    logprobs: tuple[PromptLogprob, ...] = ()
    pinned: tuple[PinnedPrefix, ...] = ()


@dataclass(frozen=True, slots=True)
class Decoded(Event):
    """One sampled token; `text` is the new text that can be emitted (it may lag behind the token)."""

    kind: ClassVar[str] = "decoded"
    step: int = 0
    token_id: int = -1
    index: int = 0  # 0 is the first output token
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    channel: str = "text"  # or thought


@dataclass(frozen=True, slots=True)
class Verified(Event):
    """The verification of draft tokens: of `drafted` tokens the first `accepted` were accepted.

    Decoded events of the same step follow: the accepted tokens, up to the end of the request, and one more.
    """

    kind: ClassVar[str] = "verified"
    step: int = 0
    drafted: int = 0
    accepted: int = 0
    token_ids: tuple[int, ...] = ()  # the draft tokens; in a draft tree the accepted ones come first


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """A preemption: the sequence freed its pages and will be recomputed; its tokens are kept."""

    kind: ClassVar[str] = "preempted"
    step: int = 0
    reason: str = ""


class RoutingOption(NamedTuple):
    """A replica as the router saw it: its number of samples, the tokens to compute before their next output tokens, and
    the tokens of this prompt that the router expects in its prefix cache.
    """

    replica: int
    samples: int
    pending_prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Routed(Event):
    """The router sent a request to `replica` for `reason`; `options` are the candidate replicas."""

    kind: ClassVar[str] = "routed"
    reason: str = ""
    options: tuple[RoutingOption, ...] = ()


@dataclass(frozen=True, slots=True)
class Moved(Event):
    """A request continues at another replica, `replica`, after `generated_tokens` emitted tokens.

    `Routed` follows, with the reason for the choice of `replica`; `reason` is the reason for leaving `source`.
    """

    kind: ClassVar[str] = "moved"
    source: int = 0  # the replica that had the request before
    reason: str = ""
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HandedOver(Event):
    """A request continues at the engine `replica` with the pages that `source` computed (cluster/pools.py). `time` is
    when the pages had arrived.
    """

    kind: ClassVar[str] = "handed_over"
    source: int = 0  # the engine that computed the pages
    pages: int = 0
    bytes: int = 0  # bytes transferred; 0: the engines share memory, and only page numbers were sent
    seconds: float = 0.0  # seconds from the offer of the pages to their arrival


@dataclass(frozen=True, slots=True)
class ThreadsChanged(Event):
    """A change of the number of threads that compiled steps use, after this step, with its reason (see
    executors/contention.py).
    """

    kind: ClassVar[str] = "threads_changed"
    step: int = 0
    threads: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SettingsChanged(Event):
    """A change of a setting from the next step on, of the scheduler (`Runner.set_schedule`) or of a widget's load."""

    kind: ClassVar[str] = "settings_changed"
    name: str = ""
    old: str = ""
    new: str = ""


@dataclass(frozen=True, slots=True)
class ExpertsUsed(Event):
    """The number of rows that each expert computed in a step: (layer, rows by expert) for each mixture-of-experts
    layer. Emitted while `Runner.record_experts` is on.
    """

    kind: ClassVar[str] = "experts_used"
    step: int = 0
    layers: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished(Event, Displayable):
    """The end of a request or sample. `text` is the end of the text, as far as no event had it before; `output_text` is
    the whole output.
    """

    kind: ClassVar[str] = "finished"
    reason: str = ""
    error: str = ""
    token_ids: tuple[int, ...] = ()
    output_text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0  # taken from the cache: of another request or sample, or of this one before a preemption
    computed_tokens: int = 0  # tokens computed, recomputation after a preemption included
    restored_tokens: int = 0  # swapped in from the CPU after a preemption
    # Computed tokens added to the prefix cache, in whole pages, output tokens included.
    written_tokens: int = 0
    shared_pages: int = 0  # pages with the cached tokens, summed over all cache groups
    score: float | None = None  # the score by which best_of and beams rank
    # Cause of the end: eos, stop_token, stop_string, grammar (the answer is complete), max_tokens or context (the
    # model's context is full); empty for any other cause. `stop_reason` is the id of that token, or that string. If a
    # fleet refused the request for now: overloaded (too many waiting requests) or unavailable (no replica can start).
    ended_by: str = ""
    stop_reason: int | str | None = None
    thought_text: str = ""
    thinking_tokens: int = 0  # tokens between the control tokens of a thought; included in `token_ids`
    pinned: tuple[PinnedPrefix, ...] = ()  # outcomes of the request's pins
    prompt_logprobs: tuple[PromptLogprob, ...] = ()  # for every token of the prompt, if requested

    def _display_table(self) -> Table:
        rows: list[tuple[str, object]] = [("text", self.output_text)] if self.output_text else []
        rows += [("tokens", f"{len(self.token_ids)} after {self.prompt_tokens} of the prompt")]
        ended = f"{self.ended_by}, {self.stop_reason!r}" if self.stop_reason is not None else self.ended_by
        details = {"ended by": ended, "error": self.error, "thought": self.thought_text,
                "found in the cache": self.cached_tokens,
                "computed": self.computed_tokens, "written to the cache": self.written_tokens,
                "swapped in from the CPU": self.restored_tokens, "score": self.score}  # fmt: skip
        rows += [(name, value) for name, value in details.items() if value]
        sample = f", sample {self.sample}" if self.sample else ""
        return Table(f"{self.request_id or 'request'}{sample}: {self.reason}", rows)


@dataclass(frozen=True, slots=True)
class Stepped(Event):
    """The end of one step of the runner. `pages_used` is the number of pages in use during the step, before any was
    freed.
    """

    kind: ClassVar[str] = "stepped"
    step: int = 0
    phase: str = ""  # prefill, decode or mixed
    requests: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0  # draft tokens count only if accepted
    pages_used: int = 0
    kv_bytes: int = 0  # bytes of these pages
    wall_seconds: float = 0.0
    forward_seconds: float = 0.0
    telemetry_seconds: float = 0.0  # time of the telemetry itself
    predicted_flops: float = 0.0
    predicted_bytes: float = 0.0
    pages_idle: int = 0  # pages referenced only by the prefix cache
    compiles: int = 0  # graphs compiled up to and including this step
    context_tokens: int = 0  # positions that attention reads: all that the step's queries see
    drafted_tokens: int = 0  # draft tokens verified in this step
    accepted_tokens: int = 0  # draft tokens accepted in this step
    draft_seconds: float = 0.0  # time of the proposer
    kernel_seconds: float | None = None  # forward time spent in compiled code; None if unknown
    padding_rows: int = 0  # rows of a padded batch without a sequence
