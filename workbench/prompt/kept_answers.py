"""Put the generated tokens of answers into a prompt that holds exactly their text or an equivalent rendering.

JSON has several spellings, and invalid bytes are shown as U+FFFD, but only the generated tokens are in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from workbench.prompt.answers import AnswerFormat, parse_answer
from workbench.prompt.template_encoding import TemplateEncoder
from workbench.prompt.traced import Origin, Traced, joined, runs_of
from workbench.prompt.turns import AssistantTurn, ResultTurn, UserTurn

KEPT = "kept"  # field name of the origin of generated tokens
NO_STAND_IN = "the tokenizer has no control token without spaces around it"
NEAR = 200  # characters before an answer: they decide how its first token is decoded
MAX_MATCHES = 200  # positions in the generated text where a turn's text may begin


def keep_answers(
    text: Traced,
    turns: Sequence[UserTurn | AssistantTurn | ResultTurn],
    encoder: TemplateEncoder,
    format: AnswerFormat,
    end_token_ids: Sequence[int],
    opening: Callable[[], str],
) -> tuple[Traced, dict[int, str]]:
    """Replace the text of each generated turn that equals the text of its generated tokens by a stand-in with an origin
    of its own.

    Args:
        text: the rendered conversation.
        turns: the conversation's turns.
        encoder: the template's encoder.
        format: the control tokens of answers.
        end_token_ids: the control token that ends an answer, if the template writes one.
        opening: returns the text that the template writes before an answer.

    Returns:
        the text, and by turn `kept` or the reason why its tokens are not kept.
    """
    stand_in = encoder.tokenizer.plain_special_token
    answers: dict[int, str] = {}
    pieces: list[Traced] = []
    starts = _starts_of_messages(text)
    place = 0
    for number, turn in enumerate(turns):
        if not isinstance(turn, AssistantTurn) or not turn.generated_ids:
            continue
        spoken = encoder.tokenizer.exact_text(turn.generated_ids)
        found, length = None, len(spoken or "")
        if stand_in is None or number not in starts:
            answers[number] = f"read back: {'the template shows nothing of it' if stand_in else NO_STAND_IN}"
            continue
        if spoken is not None:
            found = _find(text, number, starts[number], turn.generated_ids, spoken, encoder)
        if found is None:
            at = str.__str__(text).rfind(opening(), place, starts[number][0])
            places = (at, at + len(opening()))
            found, length = (
                (0, 0) if at < 0 else _same_meaning(text, number, places, turn, encoder, format, end_token_ids)
            )
            found = found if length else None
        why = "its tokens end within a character" if spoken is None else "the template writes it differently"
        answers[number] = KEPT if found is not None else f"read back: {why}"
        if found is not None and found >= place:
            pieces += [text[place:found], Traced(stand_in, Origin("template", number, KEPT))]
            place = found + length
    return joined([*pieces, text[place:]]), answers


def _starts_of_messages(text: Traced) -> dict[int, tuple[int, int]]:
    """Return the range of characters [first, last) of each message."""
    starts: dict[int, tuple[int, int]] = {}
    place = 0
    for length, origin in runs_of(text):
        if origin.part == "message" and origin.index is not None:
            starts.setdefault(origin.index, (place, place + length))
        place += length
    return starts


def _find(
    text: Traced, number: int, start: tuple[int, int], ids: Sequence[int], spoken: str, encoder: TemplateEncoder
) -> int | None:
    """Return the position of `spoken` in `text` if all of it is this message's rendering and its control tokens are
    written by the template.
    """
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


def _same_meaning(
    text: Traced,
    number: int,
    opening: tuple[int, int],
    turn: AssistantTurn,
    encoder: TemplateEncoder,
    format: AnswerFormat,
    end_token_ids: Sequence[int],
) -> tuple[int, int]:
    """Return the position and length of a turn's rendering after its opening if its thought, text and calls equal those
    of the generated tokens; otherwise length 0.
    """
    begin, last, at = opening[1], 0, 0
    for length, origin in runs_of(text):
        at += length
        last = at if turn_shown(origin) == number else last
    name = next((name for name, id in encoder.control_ids.items() if id in end_token_ids), "")
    end = str.__str__(text).find(name, last) if name else -1
    stretch = text[begin : max(end, 0)]
    if not str.__str__(stretch) or not all(
        each.is_written or each.part == "computed" or turn_shown(each) == number for _, each in runs_of(stretch)
    ):
        return 0, 0
    ids, generated = [token.id for token in encoder.encode(stretch)], list(turn.generated_ids)
    has_end = generated[-1:] == list(end_token_ids)
    generated = generated[:-1] if has_end else generated
    in_thought = format.ends_in_thought([token.id for token in encoder.encode(text[opening[0] : begin])])
    before = [token.id for token in encoder.encode(text[max(0, begin - NEAR) : begin])]
    if not in_thought and format.thought is not None and ids[:1] == [format.thought[0]] != generated[:1]:
        name_length = len(encoder.tokenizer.exact_text(ids[:1]) or "")  # the prompt had opened the thought
        in_thought, begin = True, begin + name_length
        ids, stretch = ids[1:], stretch[name_length:]
    said = parse_answer(generated, encoder.tokenizer, format, in_thought, before)
    shown = parse_answer(ids, encoder.tokenizer, format, in_thought, before)
    controls = frozenset(encoder.control_ids.values())
    same_controls = [id for id in ids if id in controls] == [id for id in generated if id in controls]
    if not same_controls or not _meaning(said) == _meaning(shown) == _meaning(turn):
        return 0, 0
    return begin, len(str.__str__(stretch)) + (len(name) if has_end else 0)


def _meaning(turn: AssistantTurn) -> tuple[object, ...]:
    return turn.content, turn.thinking, [(call.name, call.arguments) for call in turn.tool_calls]


def _control_places(ids: Sequence[int], encoder: TemplateEncoder) -> Iterator[tuple[int, int]]:
    """Yield the character range of each control token in the text of `ids`."""
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
