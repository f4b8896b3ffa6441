"""Say why a prompt was not read from the prefix cache, given an earlier one with which it should share its beginning,
what that cost, and what it would have cost with a breakpoint elsewhere.

earlier prompt  | system | tools | turn 0 | turn 1 |
this prompt     | system | tools | turn 0 | TURN 1 | turn 2 |
                  read from the cache ....^ the token, the part and the turn where they part

earlier prompt  | monday | rules | tools | turn 0 |        behind what stays: | rules | tools | turn 0 | monday |
this prompt     | TUESDAY| rules | tools | turn 0 |                           | rules | tools | turn 0 | TUESDAY|
                ^ nothing is read                                               all of this is read ...^
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from workbench.prompt.assemble import Divergence, Prompt, Segment

MissKind = Literal[
    "model_changed",
    "system_changed",
    "tools_changed",
    "messages_changed",
    "previous_not_found",
    "evicted",
    "unavailable",
]
KIND_OF_PART: Mapping[str, MissKind] = {
    "tool": "tools_changed",
    "system": "system_changed",
    "document": "system_changed",  # documents and arguments of the template come before the first message
    "argument": "system_changed",
}
BEHIND_WHAT_STAYS = "all that changes behind all that stays"


@dataclass(frozen=True)
class PromptSeen:
    """A prompt that a model was asked to read.

    `prompt` has its segments; None for ids and texts that were completed without a template. `pinned_tokens` of its
    beginning were kept for a breakpoint.
    """

    model: str
    token_ids: tuple[int, ...]
    prompt: Prompt | None = None
    pinned_tokens: int = 0


@dataclass(frozen=True)
class CacheMiss:
    """The reason why tokens of an earlier prompt were not read from the cache by this one, and its price.

    The price is `missed_tokens`: with those that were read they are the whole pages that this prompt would have read,
    had it begun with the earlier one. They are 0 where the earlier prompt is not known.

    Args:
        kind: what changed first; `previous_not_found` if the earlier prompt is not kept (any more); `evicted` if the
            beginning is the same and its pages are gone, or not yet written; `unavailable` without a prefix cache.
        missed_tokens: tokens that were computed again.
        evicted_tokens: of these, tokens before the first difference: the same, and not in the cache.
        token: the position of the first token that differs; None if none does.
        part: the segment in which it stands (`message 3: calls`).
        turn: the turn that this segment shows; None outside of turns.
        was: the text from there on in the earlier prompt.
        now: the text from there on in this prompt.
        missed_seconds: the time of these tokens at the pace of the engine; None while it has measured none.
        elsewhere: the place at which fewest tokens would have been computed again, had a breakpoint stood there in
            both prompts: `breakpoint after turn 3`, or `BEHIND_WHAT_STAYS`, where equal segments stay, and of a changed
            one that is no turn its beginning and end; empty where no other place is better.
        elsewhere_tokens: tokens that would have been computed again there; `missed_tokens` where none is better.
        elsewhere_seconds: the time of these.
    """

    kind: MissKind
    missed_tokens: int = 0
    evicted_tokens: int = 0
    token: int | None = None
    part: str = ""
    turn: int | None = None
    was: str = ""
    now: str = ""
    missed_seconds: float | None = None
    elsewhere: str = ""
    elsewhere_tokens: int = 0
    elsewhere_seconds: float | None = None

    def __str__(self) -> str:
        words = f"{self.kind.replace('_', ' ')}: {_priced(self.missed_tokens, self.missed_seconds)} were computed again"
        if self.token is not None:
            words += f"; token {self.token}, in {self.part}: {self.now!r} stands where {self.was!r} stood"
        words += f"; pages of {self.evicted_tokens} tokens are gone" if self.evicted_tokens else ""
        there = _priced(self.elsewhere_tokens, self.elsewhere_seconds)
        return words + (f"; with {self.elsewhere} it had been {there}" if self.elsewhere else "")

    def as_values(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def explain_miss(
    earlier: PromptSeen | None,
    present: PromptSeen,
    cached_tokens: int,
    page_size: int | None,
    seconds_per_token: float = 0.0,
) -> CacheMiss | None:
    """Return why `present` did not read all of `earlier` from the cache; None if it did.

    Args:
        earlier: the prompt whose prefix is expected in the cache; None if it is not known.
        present: the prompt that was read.
        cached_tokens: tokens of it that were found in the cache.
        page_size: tokens of a page, in which prefixes are found; None without a prefix cache.
        seconds_per_token: the engine's pace of prompts; 0 while it has measured none.
    """
    if earlier is None:
        return CacheMiss("previous_not_found")
    miss = _find_miss(earlier, present, cached_tokens, page_size)
    if miss is None:
        return None
    place, tokens = "", miss.missed_tokens
    if page_size is not None and earlier.model == present.model:
        readable = cached_tokens + miss.missed_tokens
        for name, beginning in _other_places(earlier, present, readable, page_size):
            if (left := readable - min(readable, beginning)) < tokens:
                place, tokens = name, left
    miss = replace(miss, elsewhere=place, elsewhere_tokens=tokens)
    if not seconds_per_token:
        return miss
    seconds, there = (count * seconds_per_token for count in (miss.missed_tokens, tokens))
    return replace(miss, missed_seconds=seconds, elsewhere_seconds=there)


def _find_miss(earlier: PromptSeen, present: PromptSeen, cached_tokens: int, page_size: int | None) -> CacheMiss | None:
    """Return what `explain_miss` does, without the price."""
    if page_size is None:
        return CacheMiss("unavailable", min(len(earlier.token_ids), len(present.token_ids)))
    # The last token of a prompt is always computed.
    readable = _whole_pages(min(len(earlier.token_ids), len(present.token_ids) - 1), page_size)
    missed = readable - cached_tokens
    if missed <= 0:
        return None
    if earlier.model != present.model:
        return CacheMiss("model_changed", missed, token=0, was=earlier.model, now=present.model)
    place = first_difference(earlier.token_ids, present.token_ids)
    evicted = max(0, min(readable, _whole_pages(place, page_size)) - cached_tokens)
    if place >= readable:
        return CacheMiss("evicted", missed, evicted)
    was, now = earlier.prompt, present.prompt
    if was is None or now is None:
        return CacheMiss("messages_changed", missed, evicted, place, "prompt")
    parted = now.divergence(was) or Divergence(place, "", "", "")  # its answer is no part of what is compared here
    segment = next((each for each in now.segments if each.start <= place < each.end), None)
    name, turn = ("its end", None) if segment is None else (segment.name, segment.turn)
    return CacheMiss(_kind(was, now, place), missed, evicted, place, name, turn, parted.was, parted.now)


def _other_places(earlier: PromptSeen, present: PromptSeen, readable: int, page_size: int) -> Iterator[tuple[str, int]]:
    """Yield places of breakpoints, and the tokens in whole pages that both prompts have alike up to each."""
    was, now = earlier.prompt, present.prompt
    if was is None or now is None:
        return
    place = first_difference(was.ids, now.ids)
    old, new = ({name: _whole_pages(end, page_size) for name, end in each.part_ends().items()} for each in (was, now))
    kept, name = max(((end, name) for name, end in old.items() if new.get(name) == end <= place), default=(0, ""))
    if kept > earlier.pinned_tokens:
        yield f"breakpoint after {name}", kept
    if place < readable:
        before = _by_name(was)
        stay = sum(_tokens_that_stay(before[key], each) for key, each in _by_name(now).items() if key in before)
        yield BEHIND_WHAT_STAYS, _whole_pages(stay, page_size)


def _tokens_that_stay(was: Segment, now: Segment) -> int:
    """Count the tokens of a segment that stay: of a turn all or none, of another those before and behind a change."""
    old, new = was.token_ids, now.token_ids
    if old == new or now.turn is not None:
        return len(new) if old == new else 0
    front = first_difference(old, new)
    return front + first_difference(old[front:][::-1], new[front:][::-1])


def _by_name(prompt: Prompt) -> dict[tuple[str, int], Segment]:
    """Return the segments by name, and by number among those of the name."""
    seen: Counter[str] = Counter()
    found = {}
    for each in prompt.segments:
        found[each.name, seen[each.name]] = each
        seen[each.name] += 1
    return found


def first_difference(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the first position at which two prompts differ, or the length of the shorter."""
    low, high = 0, min(len(one), len(other))  # equal before `low`; tuples are compared in C
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _kind(was: Prompt, now: Prompt, place: int) -> MissKind:
    """Return what changed: the part at `place` in either prompt, or the next where the template's own text is there."""
    old, new = was.conversation, now.conversation
    changed = {
        "tools_changed": old.tools != new.tools,
        "system_changed": (old.system, old.documents, old.template_arguments)
        != (new.system, new.documents, new.template_arguments),
    }
    parts = [part for prompt in (now, was) if (part := _parts_from(prompt, place)[0]) != "template"]
    parts += [next((part for part in _parts_from(prompt, place) if part != "template"), "") for prompt in (now, was)]
    kinds: list[MissKind] = [KIND_OF_PART.get(part, "messages_changed") for part in parts]
    for kind in kinds:
        if changed.get(kind, False):
            return kind
    return "messages_changed"


def _parts_from(prompt: Prompt, place: int) -> list[str]:
    return [each.name.split(" ")[0].rstrip(":") for each in prompt.segments if each.end > place] or [""]


def _priced(tokens: int, seconds: float | None) -> str:
    return f"{tokens} tokens" + ("" if seconds is None else f" ({seconds:.3g} s)")


def _whole_pages(tokens: int, page_size: int) -> int:
    return max(0, tokens) // page_size * page_size
