"""Put the tokens of answers, as they were generated, where a prompt holds exactly their text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from workbench.prompt.template_encoding import TemplateEncoder
from workbench.prompt.traced import Origin, Traced, joined, runs_of
from workbench.prompt.turns import AssistantTurn, ResultTurn, UserTurn

KEPT = "kept"  # the field of an origin: tokens as they were generated
MAX_MATCHES = 200  # places where a turn's text may begin in what was generated


def keep_answers(
    text: Traced, turns: Sequence[UserTurn | AssistantTurn | ResultTurn], encoder: TemplateEncoder
) -> tuple[Traced, dict[int, str]]:
    """Put a stand-in, with an origin of its own, where the text of a turn is exactly that of its generated tokens."""
    stand_in = encoder.tokenizer.plain_special_token
    answers: dict[int, str] = {}
    pieces: list[Traced] = []
    starts = _starts_of_messages(text)
    place = 0
    for number, turn in enumerate(turns):
        if not isinstance(turn, AssistantTurn) or not turn.generated_ids:
            continue
        spoken = encoder.tokenizer.exact_text(turn.generated_ids)
        found = None
        if stand_in is None or spoken is None:
            answers[number] = "read back: its tokens end within a character"
        elif number not in starts:
            answers[number] = "read back: the template shows nothing of it"
        else:
            found = _find(text, number, starts[number], turn.generated_ids, spoken, encoder)
            answers[number] = KEPT if found is not None else "read back: the template writes it differently"
        if found is not None and found >= place and stand_in is not None and spoken is not None:
            pieces += [text[place:found], Traced(stand_in, Origin("template", number, KEPT))]
            place = found + len(spoken)
    return joined([*pieces, text[place:]]), answers


def _starts_of_messages(text: Traced) -> dict[int, tuple[int, int]]:
    """Return the first characters [first, last) of each message."""
    found: dict[int, tuple[int, int]] = {}
    place = 0
    for length, origin in runs_of(text):
        if origin.part == "message" and origin.index is not None:
            found.setdefault(origin.index, (place, place + length))
        place += length
    return found


def _find(
    text: Traced, number: int, start: tuple[int, int], ids: Sequence[int], spoken: str, encoder: TemplateEncoder
) -> int | None:
    """Return where `spoken` stands in `text`, if it is the rendering of this message alone, with its control tokens
    written by the template."""
    first, last = start
    words, plain, at = str.__str__(text)[first:last], str.__str__(text), -1
    controls = [*_control_places(ids, encoder)]
    for _ in range(MAX_MATCHES):
        at = spoken.find(words, at + 1)
        if at < 0:
            return None
        begin = first - at
        if begin < 0 or not plain.startswith(spoken, begin):
            continue
        stretch = text[begin : begin + len(spoken)]
        alone = all(o.is_written or o.part == "computed" or turn_shown(o) == number for _, o in runs_of(stretch))
        if alone and all(all(o.is_written for _, o in runs_of(stretch[a:b])) for a, b in controls):
            return begin
    return None


def _control_places(ids: Sequence[int], encoder: TemplateEncoder) -> Iterator[tuple[int, int]]:
    """Yield the characters of each control token in the text of `ids`."""
    controls = frozenset(encoder.control_ids.values())
    place = 0
    for is_control, group in groupby(ids, controls.__contains__):
        for part in ([each] for each in group) if is_control else ([*group],):
            length = len(encoder.tokenizer.exact_text(part) or "")
            if is_control:
                yield place, place + length
            place += length


def turn_shown(origin: Origin) -> int | None:
    return origin.index if origin.part == "message" or origin.field == KEPT else None
