"""Call a policy and validate its decision: an invalid entry fails the request that it names and no other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from workbench.errors import WorkbenchError
from workbench.request import Sequence
from workbench.scheduler.plan import RequestDecision
from workbench.scheduler.policy import SchedulerDecision, SchedulerState, SchedulingPolicy


@dataclass
class ValidatedDecision:
    """A validated decision. `errors` has each request with an invalid entry, and its beams, with the error; `ignored`
    has invalid entries that fail no request."""

    num_scheduled_tokens: dict[Sequence, int] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    reasons: Mapping[str, str] = field(default_factory=dict)
    errors: list[tuple[Sequence, str]] = field(default_factory=list)
    ignored: list[RequestDecision] = field(default_factory=list)


def policy_name(policy: SchedulingPolicy) -> str:
    return getattr(policy, "kind", None) or getattr(policy, "__qualname__", None) or type(policy).__qualname__


def call_policy(policy: SchedulingPolicy, state: SchedulerState) -> SchedulerDecision:
    """Call `policy` on `state`. Nothing has changed if it fails.

    Raises:
        WorkbenchError: if the policy raises, or returns no SchedulerDecision.
    """
    name = policy_name(policy)
    try:
        decision = policy(state)
        if isinstance(decision, SchedulerDecision):  # it may return iterators, or a list that it changes later
            if not isinstance(decision.reasons, Mapping):
                raise WorkbenchError(f"policy {name}: reasons is {decision.reasons!r}, must be {{id: reason}}")
            tokens, preempted = tuple(decision.num_scheduled_tokens), tuple(decision.preempted)
            if type(decision) is SchedulerDecision:
                return SchedulerDecision(tokens, preempted, decision.reasons)
            return replace(decision, num_scheduled_tokens=tokens, preempted=preempted)
    except WorkbenchError:
        raise
    except Exception as error:
        raise WorkbenchError(f"policy {name}: raised {type(error).__name__}: {error}; nothing was planned") from error
    else:
        raise WorkbenchError(
            f"policy {name}: returned {type(decision).__name__}, "
            "must return scheduler.policy.SchedulerDecision([(id, tokens), ...])"
        )


def validate_decision(
    decision: SchedulerDecision, state: SchedulerState, by_id: Mapping[str, Sequence], name: str
) -> ValidatedDecision:
    """Check every entry of a decision; an invalid one fails the request that it names and no other."""
    found, left, refused = ValidatedDecision(reasons=decision.reasons), state.max_num_batched_tokens, set[Sequence]()
    if not decision.preempted and (whole := _all_valid(decision.num_scheduled_tokens, left, by_id)) is not None:
        found.num_scheduled_tokens = whole
        return found
    here = {entry.request_id for entry in state.running}

    def wrong(sequence: Sequence, words: str) -> None:
        for each in sequence.beams or [sequence]:
            found.num_scheduled_tokens.pop(each, None)
            if each not in refused:
                refused.add(each)
                found.errors.append((each, f"policy {name}: {words}"))

    for place, pair in enumerate(decision.preempted):
        sequence = _find(by_id, pair)
        if sequence is None or pair not in here:
            found.ignored.append(_ignored(pair, f"policy {name}: entry {place} preempts {pair!r}, which does not run"))
        elif sequence not in found.preempted:
            found.preempted.append(sequence)
    for place, pair in enumerate(decision.num_scheduled_tokens):
        if type(pair) is tuple and len(pair) == 2 and type(pair[1]) is int and 0 <= pair[1] <= left:
            sequence = _find(by_id, pair[0])  # the common case: a valid entry
            if (
                sequence
                and sequence not in found.num_scheduled_tokens
                and not refused
                and not (found.preempted and pair[1])
            ):
                found.num_scheduled_tokens[sequence] = pair[1]
                left -= pair[1]
                continue
        try:
            request_id, tokens = pair
            sequence = _find(by_id, request_id)
            whole = not isinstance(tokens, bool) and bool(int(tokens) == tokens)
        except (TypeError, ValueError, OverflowError):
            found.ignored.append(_ignored("", f"policy {name}: entry {place} is {pair!r}, must be (id, tokens)"))
            continue
        if sequence is None:
            known = f"entry {place} is for {request_id!r}, which neither runs nor waits"
            found.ignored.append(_ignored(request_id, f"policy {name}: {known}"))
        elif sequence in found.num_scheduled_tokens or sequence in refused:
            wrong(sequence, f"schedules {request_id} twice in one step")
        elif not whole or tokens < 0:
            wrong(sequence, f"schedules {tokens!r} tokens for {request_id}; it must be a number from 0 on")
        elif sequence in found.preempted and tokens:
            wrong(sequence, f"schedules {tokens} tokens for {request_id} and preempts it in the same step")
        elif tokens > left:
            wrong(
                sequence,
                f"schedules {tokens} tokens for {request_id}, "
                f"{left} are left of the step's {state.max_num_batched_tokens}",
            )
        else:
            found.num_scheduled_tokens[sequence] = int(tokens)
            left -= int(tokens)
    return found


def _all_valid(
    pairs: Iterable[tuple[str, int]], budget: int, by_id: Mapping[str, Sequence]
) -> dict[Sequence, int] | None:
    """Check all entries at once, the common case; None if each must be looked at."""
    try:
        pairs = tuple(pairs)
        tokens = dict(pairs)  # fewer if a request is named twice
        sequences = [by_id[name] for name in tokens]
    except (KeyError, TypeError, ValueError):
        return None
    counts = tokens.values()
    if len(tokens) < len(pairs) or set(map(type, counts)) - {int}:
        return None
    return dict(zip(sequences, counts, strict=True)) if sum(counts) <= budget and min(counts, default=0) >= 0 else None


def _find(by_id: Mapping[str, Sequence], request_id: object) -> Sequence | None:
    """Return the sequence with this id; None if there is none, or if it is no id at all."""
    return by_id.get(request_id) if isinstance(request_id, str) else None


def _ignored(name: object, reason: str) -> RequestDecision:
    return RequestDecision(str(name), "refused_decision", reason)
