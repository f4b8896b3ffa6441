"""Say why a prompt was not read from the prefix cache, given an earlier one with which it should share its beginning.

earlier prompt  | system | tools | turn 0 | turn 1 |
this prompt     | system | tools | turn 0 | TURN 1 | turn 2 |
                  read from the cache ....^ the token, the part and the turn where they part
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from workbench.prompt.assemble import Divergence, Prompt

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


@dataclass(frozen=True)
class PromptSeen:
    """A prompt that a model was asked to read.

    `prompt` has its segments; None for ids and texts that were completed without a template.
    """

    model: str
    token_ids: tuple[int, ...]
    prompt: Prompt | None = None


@dataclass(frozen=True)
class CacheMiss:
    """The reason why tokens of an earlier prompt were not read from the cache by this one.

    Args:
        kind: what changed first; `previous_not_found` if the earlier prompt is not kept (any more); `evicted` if the
            beginning is the same and its pages are gone, or not yet written; `unavailable` without a prefix cache.
        missed_tokens: tokens that would have been read, had this prompt begun with the earlier one.
        evicted_tokens: of these, tokens before the first difference: the same, and not in the cache.
        token: the position of the first token that differs; None if none does.
        part: the segment in which it stands (`message 3: calls`).
        turn: the turn that this segment shows; None outside of turns.
        was: the text from there on in the earlier prompt.
        now: the text from there on in this prompt.
    """

    kind: MissKind
    missed_tokens: int = 0
    evicted_tokens: int = 0
    token: int | None = None
    part: str = ""
    turn: int | None = None
    was: str = ""
    now: str = ""

    def __str__(self) -> str:
        words = f"{self.kind.replace('_', ' ')}: {self.missed_tokens} tokens were computed again"
        if self.token is not None:
            words += f"; token {self.token}, in {self.part}: {self.now!r} stands where {self.was!r} stood"
        return words + (f"; pages of {self.evicted_tokens} tokens are gone" if self.evicted_tokens else "")

    def as_values(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def explain_miss(
    earlier: PromptSeen | None, present: PromptSeen, cached_tokens: int, page_size: int | None
) -> CacheMiss | None:
    """Return why `present` did not read all of `earlier` from the cache; None if it did.

    Args:
        earlier: the prompt whose prefix is expected in the cache; None if it is not known.
        present: the prompt that was read.
        cached_tokens: tokens of it that were found in the cache.
        page_size: tokens of a page, in which prefixes are found; None without a prefix cache.
    """
    if earlier is None:
        return CacheMiss("previous_not_found")
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


def _whole_pages(tokens: int, page_size: int) -> int:
    return max(0, tokens) // page_size * page_size
