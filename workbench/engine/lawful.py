"""Validate a policy's decision before any of it is carried out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from workbench.engine.plan import Decision
from workbench.engine.policy import Policy, State, Wishes
from workbench.errors import WorkbenchError
from workbench.request import Sequence


@dataclass
class Lawful:
    """A validated decision. `errors` are requests with an invalid entry, with their beams; `ignored` concerns no
    request."""

    tokens: dict[Sequence, int] = field(default_factory=dict)
    set_back: list[Sequence] = field(default_factory=list)
    because: Mapping[str, str] = field(default_factory=dict)
    faults: list[tuple[Sequence, str]] = field(default_factory=list)
    strays: list[Decision] = field(default_factory=list)


def name_of(policy: Policy) -> str:
    return getattr(policy, "kind", None) or getattr(policy, "__qualname__", None) or type(policy).__qualname__


def ask(policy: Policy, state: State) -> Wishes:
    """Call `policy` on `state`. Nothing has changed if it fails.

    Raises:
        WorkbenchError: if it raises, or returns no SchedulerDecision.
    """
    name = name_of(policy)
    try:
        wishes = policy(state)
        if isinstance(wishes, Wishes):  # it may return iterators, or a list that it changes later
            tokens, set_back = tuple(wishes.tokens), tuple(wishes.set_back)
            if type(wishes) is Wishes:
                return Wishes(tokens, set_back, wishes.because)
            return replace(wishes, tokens=tokens, set_back=set_back)
    except WorkbenchError:
        raise
    except Exception as error:
        raise WorkbenchError(f"policy {name}: raised {type(error).__name__}: {error}; nothing was planned") from error
    else:
        raise WorkbenchError(
            f"policy {name}: gave {type(wishes).__name__}, must give engine.policy.Wishes([(id, tokens), ...])"
        )


def lawful(wishes: Wishes, state: State, by_id: Mapping[str, Sequence], name: str) -> Lawful:
    """Check every entry of a decision; an invalid one fails the request that it names and no other."""
    found, left, faulty = Lawful(because=wishes.because), state.budget, set[Sequence]()
    if not wishes.set_back and (whole := _whole(wishes.tokens, left, by_id)) is not None:
        found.tokens = whole
        return found
    here = {entry.id for entry in state.running}

    def wrong(sequence: Sequence, words: str) -> None:
        for each in sequence.mates or [sequence]:
            found.tokens.pop(each, None)
            if each not in faulty:
                faulty.add(each)
                found.faults.append((each, f"policy {name}: {words}"))

    for place, pair in enumerate(wishes.set_back):
        sequence = by_id.get(pair)
        if sequence is None or pair not in here:
            found.strays.append(_stray(pair, f"policy {name}: wish {place} sets back {pair!r}, which does not run"))
        elif sequence not in found.set_back:
            found.set_back.append(sequence)
    for place, pair in enumerate(wishes.tokens):
        if type(pair) is tuple and len(pair) == 2 and type(pair[1]) is int and 0 <= pair[1] <= left:
            sequence = by_id.get(pair[0])  # the common case: a valid entry
            if sequence and sequence not in found.tokens and not faulty and not (found.set_back and pair[1]):
                found.tokens[sequence] = pair[1]
                left -= pair[1]
                continue
        try:
            request_id, tokens = pair
            sequence = by_id.get(request_id)
            whole = not isinstance(tokens, bool) and int(tokens) == tokens
        except (TypeError, ValueError):
            found.strays.append(_stray("", f"policy {name}: wish {place} is {pair!r}, must be (id, tokens)"))
            continue
        if sequence is None:
            known = f"wish {place} is for {request_id!r}, which neither runs nor waits"
            found.strays.append(_stray(request_id, f"policy {name}: {known}"))
        elif sequence in found.tokens or sequence in faulty:
            wrong(sequence, f"wishes for {request_id} twice in one step")
        elif not whole or tokens < 0:
            wrong(sequence, f"wishes {tokens!r} tokens for {request_id}; it must be a number from 0 on")
        elif sequence in found.set_back and tokens:
            wrong(sequence, f"wishes {tokens} tokens for {request_id} and sets it back in the same step")
        elif tokens > left:
            wrong(sequence, f"wishes {tokens} tokens for {request_id}, {left} are left of the step's {state.budget}")
        else:
            found.tokens[sequence] = int(tokens)
            left -= int(tokens)
    return found


def _whole(wishes: Iterable[tuple[str, int]], budget: int, by_id: Mapping[str, Sequence]) -> dict[Sequence, int] | None:
    """Check all entries at once, the common case; None if each must be looked at."""
    try:
        pairs = tuple(wishes)
        tokens = dict(pairs)  # fewer if a request is named twice
        sequences = [by_id[name] for name in tokens]
    except (KeyError, TypeError, ValueError):
        return None
    counts = tokens.values()
    if len(tokens) < len(pairs) or set(map(type, counts)) - {int}:
        return None
    return dict(zip(sequences, counts, strict=True)) if sum(counts) <= budget and min(counts, default=0) >= 0 else None


def _stray(name: object, reason: str) -> Decision:
    return Decision(str(name), "refused_wish", reason)
