"""Explain a prefix cache miss: why a prompt did not reuse the prefix of an earlier one, the cost, and the cost with a
breakpoint in another place.

earlier prompt  | system | tools | turn 0 | turn 1 |
this prompt     | system | tools | turn 0 | TURN 1 | turn 2 |
                  read from the cache ....^ the first token, part and turn that differ

earlier prompt  | monday | rules | tools | turn 0 |        after equal parts: | rules | tools | turn 0 | monday |
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
BEHIND_WHAT_STAYS = "all unchanged parts placed before all changed parts"


@dataclass(frozen=True)
class PromptSeen:
    """A prompt that was sent to a model.

    `prompt` has the segments; None for token ids or text without a template. A breakpoint pinned the first
    `pinned_tokens` tokens.
    """

    model: str
    token_ids: tuple[int, ...]
    prompt: Prompt | None = None
    pinned_tokens: int = 0


@dataclass(frozen=True)
class CacheMiss:
    """The reason why this prompt did not reuse cached tokens of an earlier prompt, and the cost.

    The cost is `missed_tokens`. If this prompt had begun with the whole earlier prompt, it would have reused the full
    pages of the reused and the missed tokens together. It is 0 if the earlier prompt is unknown.

    Args:
        kind: the kind of the first changed part; `previous_not_found` if the earlier prompt is not stored (any more);
            `evicted` if the prefix is equal but its pages are evicted or not written yet; `unavailable` without a
            prefix cache.
        missed_tokens: number of tokens that were computed again.
        evicted_tokens: number of missed tokens before the first difference: equal, but not in the cache.
        token: the position of the first different token; None if all are equal.
        part: the segment that contains it (`message 3: calls`).
        turn: the index of this segment's turn; None outside of turns.
        was: the earlier prompt's text from the first different token on.
        now: this prompt's text from the first different token on.
        missed_seconds: the prefill time of the missed tokens at the engine's measured speed; None before a measurement.
        elsewhere: the breakpoint position, the same in both prompts, with the fewest recomputed tokens: `breakpoint
            after turn 3`, or `BEHIND_WHAT_STAYS`: all changed text moves after all equal text (equal segments, and the
            equal beginning and end of a changed segment that is no turn). Empty if no position is better.
        elsewhere_tokens: number of recomputed tokens for that position; `missed_tokens` if none is better.
        elsewhere_seconds: the prefill time of `elsewhere_tokens`.
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
            words += f"; token {self.token}, in {self.part}: {self.now!r} in place of {self.was!r}"
        words += f"; pages of {self.evicted_tokens} tokens are gone" if self.evicted_tokens else ""
        there = _priced(self.elsewhere_tokens, self.elsewhere_seconds)
        return words + (f"; with {self.elsewhere} it had been {there}" if self.elsewhere else "")

    def as_values(self) -> dict[str, Any]:
        """Return the fields of the miss as plain values for JSON."""
        return asdict(self)


def explain_miss(
    earlier: PromptSeen | None,
    present: PromptSeen,
    cached_tokens: int,
    page_size: int | None,
    seconds_per_token: float = 0.0,
) -> CacheMiss | None:
    """Return why `present` did not reuse all of `earlier` from the cache; None if it did.

    Args:
        earlier: the prompt expected in the cache; None if unknown.
        present: the prompt that was computed.
        cached_tokens: number of tokens of `present` found in the cache.
        page_size: tokens per page, the unit of prefix matches; None without a prefix cache.
        seconds_per_token: the engine's prefill time per token; 0 before a measurement.
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
    """Return the miss that `explain_miss` reports, without its cost."""
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
    parted = now.divergence(was) or Divergence(place, "", "", "")  # the earlier answer is not compared here
    segment = next((each for each in now.segments if each.start <= place < each.end), None)
    name, turn = ("its end", None) if segment is None else (segment.name, segment.turn)
    return CacheMiss(_kind(was, now, place), missed, evicted, place, name, turn, parted.was, parted.now)


def _other_places(earlier: PromptSeen, present: PromptSeen, readable: int, page_size: int) -> Iterator[tuple[str, int]]:
    """Yield breakpoint positions, each with the number of equal tokens before it in full pages."""
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
    """Count a segment's unchanged tokens: all or none of a turn, else those before and after the change.
    """
    old, new = was.token_ids, now.token_ids
    if old == new or now.turn is not None:
        return len(new) if old == new else 0
    front = first_difference(old, new)
    return front + first_difference(old[front:][::-1], new[front:][::-1])


def _by_name(prompt: Prompt) -> dict[tuple[str, int], Segment]:
    """Return the segments by name and number of occurrence of that name."""
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
    """Return the kind of change: the part at `place` in either prompt, or the next part if `place` is template text."""
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
