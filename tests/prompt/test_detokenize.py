from __future__ import annotations

from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from tests.prompt import samples
from tests.prompt.samples import first_stop, longest_beginning
from workbench.errors import WorkbenchError
from workbench.prompt.tokenization.detokenize import Detokenizer, TextPlaces, WholeTextDetokenizer
from workbench.prompt.tokenization.tokenizer import Tokenizer


def settled(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of `ids` but for a character that is not complete: what comes next cannot change it."""
    raw = b"".join(tokenizer.token_bytes(id) for id in ids if not tokenizer.is_special(id))
    whole = tokenizer.decode(ids)
    for missing in (1, 2, 3):  # a UTF-8 character cut short ends in at most three bytes
        tail = raw[-missing:]
        if len(tail) == missing and is_begun(tail):
            return whole[:-1]
    return whole


def is_begun(tail: bytes) -> bool:
    try:
        tail.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start == 0
    return False


@given(data=st.data(), stops=samples.STOPS)
@pytest.mark.parametrize("name", samples.BY_BYTES)
def test_every_push_shows_exactly_what_is_settled(name, data, stops):
    """The law in full, against a specification that decodes prompt and text anew for every token."""
    tokenizer = samples.BY_BYTES[name]()
    before, ids = data.draw(samples.ids_of(tokenizer)), data.draw(samples.ids_of(tokenizer))
    detokenizer = Detokenizer(tokenizer, stops, before)
    first = len(tokenizer.decode(before))
    shown = ""
    for count in range(1, len(ids) + 1):
        shown += detokenizer.push(ids[count - 1])
        text = settled(tokenizer, before + ids[:count])[first:]
        found = first_stop(text, stops)
        if found:
            assert (shown, detokenizer.matched_stop) == (text[: found[0]], found[1])
            break
        assert detokenizer.matched_stop is None
        assert shown == text[: len(text) - longest_beginning(text, stops)]
    else:
        shown += detokenizer.finish()
        text = tokenizer.decode(before + ids)[first:]
        found = first_stop(text, stops)
        assert shown == (text[: found[0]] if found else text)
    assert detokenizer.text == shown
    assert detokenizer.finish() == ""


@given(data=st.data())
@pytest.mark.parametrize("name", samples.ALL)
def test_the_stream_joined_is_the_decoded_text_less_the_prompt_s(name, data):
    tokenizer = samples.ALL[name]()
    before, ids = data.draw(samples.ids_of(tokenizer)), data.draw(samples.ids_of(tokenizer))
    detokenizer, whole = Detokenizer(tokenizer, (), before), WholeTextDetokenizer(tokenizer, before)
    pieces = [detokenizer.push(id) for id in ids]
    text = tokenizer.decode(before + ids)[len(tokenizer.decode(before)) :]
    assert "".join(pieces) + detokenizer.finish() == text == detokenizer.text
    assert {whole.push(id) for id in ids} <= {""} and whole.finish() == text


@given(data=st.data())
@pytest.mark.parametrize("name", samples.ALL)
def test_a_token_s_place_is_where_its_first_character_is(name, data):
    """Never back, never behind the text, and by a byte rule exactly: the character that the first byte is of."""
    tokenizer = samples.ALL[name]()
    before, ids = data.draw(samples.ids_of(tokenizer)), data.draw(samples.ids_of(tokenizer))
    ids = [id for id in ids if not tokenizer.is_special(id) and tokenizer.token_bytes(id)]
    places = TextPlaces(tokenizer, before)
    found, first = [places.push(id) for id in ids], len(tokenizer.decode(before))
    assert found == sorted(found) and all(place <= len(tokenizer.decode_after(before, ids)) for place in found)
    if name in samples.BY_BYTES:
        parts = [tokenizer.token_bytes(id) for id in before + ids if not tokenizer.is_special(id)]
        starts = character_starts(b"".join(parts))
        stripped = len(starts) - len(tokenizer.decode(before + ids))
        at = [sum(map(len, parts[:count])) for count in range(len(parts) - len(ids), len(parts))]
        assert found == [max(0, bisect_right(starts, each) - 1 - stripped) - first for each in at]


def character_starts(raw: bytes) -> list[int]:
    """Return the first byte of each character, U+FFFD for what is none."""
    starts, at = [], 0
    while at < len(raw):
        starts.append(at)
        try:
            at += len(raw[at:].decode()[0].encode())
        except UnicodeDecodeError as error:
            at += error.end if error.start == 0 else len(raw[at : at + error.start].decode()[0].encode())
    return starts


@given(data=st.data(), stops=samples.STOPS)
@pytest.mark.parametrize("name", samples.ALL)
def test_the_stream_is_cut_at_the_stop_string(name, data, stops):
    tokenizer = samples.ALL[name]()
    ids = data.draw(samples.ids_of(tokenizer))
    plain, detokenizer = Detokenizer(tokenizer), Detokenizer(tokenizer, stops)
    shown, found = "", None
    for id in [*ids, None]:
        _, new = (d.finish() if id is None else d.push(id) for d in (plain, detokenizer))
        shown += new
        found = found or first_stop(plain.text, stops)
        assert bool(detokenizer.matched_stop) == bool(found)
    text = tokenizer.decode(ids)
    assert shown == (text[: found[0]] if found else text)
    assert detokenizer.matched_stop == (found[1] if found else None)


@given(text=samples.TEXTS)
@pytest.mark.parametrize("name", samples.BY_BYTES)
def test_no_replacement_character_that_the_text_does_not_have(name, text):
    tokenizer = samples.BY_BYTES[name]()
    detokenizer = Detokenizer(tokenizer)
    pieces = "".join(detokenizer.push(id) for id in tokenizer.encode(text))
    assert pieces == text.replace("▁", " ") if name == "sentencepiece" else pieces == text
    assert detokenizer.finish() == ""  # a whole text leaves nothing to hold back


def pushes(text: bytes | str, stops: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    """One push a byte, then the end."""
    tokenizer = samples.byte_level()
    of = {tokenizer.token_bytes(id): id for id in range(10, 266)}
    detokenizer = Detokenizer(tokenizer, stops)
    raw = text.encode() if isinstance(text, str) else text
    return [*(detokenizer.push(of[bytes([byte])]) for byte in raw), detokenizer.finish()], detokenizer


def test_a_character_is_shown_with_its_last_byte():
    assert pushes("a🙂b")[0] == ["a", "", "", "", "🙂", "b", ""]


def test_bytes_that_can_never_complete_are_shown_at_once():
    assert pushes(b"\xff\xe6\x97A\xf0\x9f")[0] == ["\ufffd", "", "", "\ufffdA", "", "", "\ufffd"]
    assert pushes(b"\xed\xa0\x80A")[0] == ["", "\ufffd" * 2, "\ufffd", "A", ""]
    assert pushes("\ud7ffA")[0] == ["", "", "\ud7ff", "A", ""]
    assert pushes("\ufffdA")[0] == ["", "", "\ufffd", "A", ""]


def test_only_what_may_begin_a_stop_string_is_held_back():
    assert pushes("ababac", ("abac",))[0] == ["", "", "", "ab", "", "", ""]
    assert pushes("abax", ("abac",))[0] == ["", "", "", "abax", ""]
    assert pushes("xab", ("abac",))[0] == ["x", "", "", "ab"]


def test_the_stop_string_that_is_complete_first_ends_the_text():
    _, detokenizer = pushes("abcdef", ("abcdef", "cd"))
    assert (detokenizer.text, detokenizer.matched_stop) == ("ab", "cd")
    _, detokenizer = pushes("abcdef", ("abcdef", "abc"))
    assert (detokenizer.text, detokenizer.matched_stop) == ("", "abc")
    _, detokenizer = pushes("xabc", ("bc", "abc", "c"))  # complete together: the one that starts first
    assert (detokenizer.text, detokenizer.matched_stop) == ("x", "abc")


def test_of_stop_strings_in_one_token_the_first_then_the_shortest_wins():
    tokenizer = samples.sentencepiece()
    (token,) = tokenizer.encode("stop")
    for stops, stopped in ((("op", "to"), "to"), (("top", "to", "t"), "t"), (("stop", "st"), "st")):
        detokenizer = Detokenizer(tokenizer, stops)
        assert detokenizer.push(token) == "stop"[: "stop".index(stopped)]
        assert detokenizer.matched_stop == stopped


def test_a_stop_string_may_end_within_a_token_and_nothing_follows_it():
    tokenizer = samples.sentencepiece()
    (token,) = tokenizer.encode("stop")
    detokenizer = Detokenizer(tokenizer, ("t",))
    assert [detokenizer.push(id) for id in (token, token, 3 + 65)] == ["s", "", ""]
    assert detokenizer.finish() == "" and detokenizer.text == "s"


def test_a_stop_string_of_a_character_that_never_completes():
    _, detokenizer = pushes(b"a\xe6", ("\ufffd",))
    assert (detokenizer.text, detokenizer.matched_stop) == ("a", "\ufffd")


def test_control_tokens_give_no_text_and_break_no_character():
    tokenizer = samples.byte_level()
    first, *rest = tokenizer.encode("🙂")
    detokenizer = Detokenizer(tokenizer)
    end = tokenizer.special_token_ids["<|end|>"]
    assert "".join(map(detokenizer.push, [end, first, end, *rest, end])) == "🙂"


def test_bad_input():
    with pytest.raises(WorkbenchError, match="token id 266 is out of range"):
        Detokenizer(samples.byte_level()).push(266)
    with pytest.raises(WorkbenchError, match="must not be empty"):
        Detokenizer(samples.byte_level(), ("a", ""))


class Counting(Tokenizer):
    """Notes how much is decoded at a time."""

    longest = 0

    def decode(self, ids, special=False):
        ids = list(ids)
        self.longest = max(self.longest, len(ids))
        return super().decode(ids, special)


def test_the_cost_of_a_token_does_not_grow_with_the_text():
    """Counted, not timed: bytes need no second look, and the window of the other decoders stays short."""
    for decoder, longest in ((samples.sentencepiece_inner().decoder, 0), (decoders.Metaspace(), 8)):
        inner = samples.sentencepiece_inner()
        inner.decoder = decoder
        tokenizer = Counting(inner)
        ids = tokenizer.encode("the stop stop and " * 50)
        detokenizer = Detokenizer(tokenizer, ("stop" * 5,))
        for id in ids:
            detokenizer.push(id)
        assert len(detokenizer.text) > 800 and tokenizer.longest <= longest
