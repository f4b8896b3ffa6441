"""Describe what happened as values: the runner yields them, the recorder keeps them. Standard library only.

Times are seconds on the runner's clock (`time.perf_counter`), raw and never rounded. Every event has `text`, so that
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
    sample: int = 0  # which of the request's `n` samples
    replica: int = 0  # of a cluster, whose replicas are counted from 1; 0: the only engine there is


class PromptLogprob(NamedTuple):
    """A token of a prompt, its log-probability after those before it (None for the first), and the likeliest tokens in
    its place with theirs."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class PinnedPrefix(NamedTuple):
    """A beginning of a prompt that was to be kept in the prefix cache for `seconds`: `tokens` as asked, and those that
    are `kept`, in whole pages and as far as pins may take pages."""

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
    generated_tokens: int = 0  # tokens after the prompt that another engine had sampled; none of them is emitted again


@dataclass(frozen=True, slots=True)
class Scheduled(Event):
    """One decision of the scheduler: `action` is admitted, waiting, cut, evicted or refused_decision."""

    kind: ClassVar[str] = "scheduled"
    step: int = 0
    action: str = ""
    reason: str = ""


class RecordedDecision(NamedTuple):
    """A policy's decision, as far as it was used (`scheduler.policy.SchedulerDecision`)."""

    order: tuple[tuple[str, int | None], ...]  # sequences, with the most tokens of a turn that has a bound
    keep: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()


class SpanRecord(NamedTuple):
    """Tokens [start, start + tokens) of a sequence in a step; the last `drafted` of them are draft tokens.

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

    `logprobs` are those of the prompt's next tokens, where they are asked for. All of a request's chunks together have
    one for each token of its prompt, in order, before its first `Decoded`. `pinned` are the request's pins that this
    chunk reached.
    """

    kind: ClassVar[str] = "prefilled"
    step: int = 0
    tokens: int = 0
    computed: int = 0
    logprobs: tuple[PromptLogprob, ...] = ()
    pinned: tuple[PinnedPrefix, ...] = ()


@dataclass(frozen=True, slots=True)
class Decoded(Event):
    """One sampled token; `text` is what may be shown now (it may lag behind the token)."""

    kind: ClassVar[str] = "decoded"
    step: int = 0
    token_id: int = -1
    index: int = 0  # 0 is the first output token
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    channel: str = "text"  # or thought


@dataclass(frozen=True, slots=True)
class Verified(Event):
    """The verification of draft tokens: the first `accepted` of `drafted` were accepted.

    Decoded events of the same step follow: the accepted tokens, up to the end of the request, and one more.
    """

    kind: ClassVar[str] = "verified"
    step: int = 0
    drafted: int = 0
    accepted: int = 0
    token_ids: tuple[int, ...] = ()  # the draft tokens; of a tree the accepted ones first


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """A preemption: the sequence freed its pages and will be computed again; its tokens are kept."""

    kind: ClassVar[str] = "preempted"
    step: int = 0
    reason: str = ""


class RoutingOption(NamedTuple):
    """A replica as a router saw it: the samples that it has, their tokens still to compute before their next ones, and
    the tokens of this prompt that it is thought to have cached."""

    replica: int
    samples: int
    pending_prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Routed(Event):
    """The router sent a request to `replica`, for `reason`; `options` are the replicas among which it chose."""

    kind: ClassVar[str] = "routed"
    reason: str = ""
    options: tuple[RoutingOption, ...] = ()


@dataclass(frozen=True, slots=True)
class Moved(Event):
    """A request goes on at another replica, `replica`, after `generated_tokens` tokens that were emitted.

    `Routed` follows, with the reason for that replica; `reason` is that for leaving `source`.
    """

    kind: ClassVar[str] = "moved"
    source: int = 0  # the replica that it was taken from
    reason: str = ""
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HandedOver(Event):
    """A request goes on at the engine `replica`, on the pages that `source` computed (cluster/pools.py). `time` is when
    it had them."""

    kind: ClassVar[str] = "handed_over"
    source: int = 0  # the engine that computed them
    pages: int = 0
    bytes: int = 0  # that travelled; 0: both engines map one memory, and only page numbers did
    seconds: float = 0.0  # since they were offered


@dataclass(frozen=True, slots=True)
class ThreadsChanged(Event):
    """Compiled steps run on another number of threads after this step, and why (see executors/contention.py)."""

    kind: ClassVar[str] = "threads_changed"
    step: int = 0
    threads: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SettingsChanged(Event):
    """A setting has another value from the next step on: of the scheduler (`Runner.set_schedule`), or of a widget's
    load."""

    kind: ClassVar[str] = "settings_changed"
    name: str = ""
    old: str = ""
    new: str = ""


@dataclass(frozen=True, slots=True)
class ExpertsUsed(Event):
    """The rows that each expert computed in a step: (layer, rows by expert) of each layer that is a mixture. Emitted
    while `Runner.record_experts` is on."""

    kind: ClassVar[str] = "experts_used"
    step: int = 0
    layers: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished(Event, Displayable):
    """The end of a request; `text` is what was still held back, `output_text` the whole."""

    kind: ClassVar[str] = "finished"
    reason: str = ""
    error: str = ""
    token_ids: tuple[int, ...] = ()
    output_text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0  # found, not computed: from another request or sample, or from before a preemption
    computed_tokens: int = 0  # by its steps, including those after a preemption
    restored_tokens: int = 0  # swapped in from the CPU after a preemption
    # Computed tokens that are new to the prefix cache: whole pages, output too.
    written_tokens: int = 0
    shared_pages: int = 0  # that held the cached tokens, of all cache groups together
    score: float | None = None  # what best_of and beams rank by
    # Cause of the end: eos, stop_token, stop_string, grammar (the answer is complete), max_tokens or context (the
    # model's is full); empty where something else did. `stop_reason` is that token's id, or that string. Of a request
    # that a fleet refused for the moment: overloaded (too many wait) or unavailable (no replica can be started).
    ended_by: str = ""
    stop_reason: int | str | None = None
    thought_text: str = ""
    thinking_tokens: int = 0  # between the control tokens of a thought; `token_ids` has them too
    pinned: tuple[PinnedPrefix, ...] = ()  # what came of the request's pins
    prompt_logprobs: tuple[PromptLogprob, ...] = ()  # of every token of the prompt, where they were asked for

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
    """One whole step of the runner. `pages_used` are those it was computed on, before any was freed."""

    kind: ClassVar[str] = "stepped"
    step: int = 0
    phase: str = ""  # prefill, decode or mixed
    requests: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0  # of the draft tokens only the accepted ones
    pages_used: int = 0
    kv_bytes: int = 0  # what those pages take
    wall_seconds: float = 0.0
    forward_seconds: float = 0.0
    telemetry_seconds: float = 0.0  # time of the telemetry itself
    predicted_flops: float = 0.0
    predicted_bytes: float = 0.0
    pages_idle: int = 0  # referenced by the prefix cache alone
    compiles: int = 0  # graphs compiled up to and including this step
    context_tokens: int = 0  # positions that its queries see: what attention reads
    drafted_tokens: int = 0  # verified in this step
    accepted_tokens: int = 0  # of these
    draft_seconds: float = 0.0  # time of the proposer
    kernel_seconds: float | None = None  # of the forward time, in compiled code; None if unknown
    padding_rows: int = 0  # rows of a padded batch without a sequence
