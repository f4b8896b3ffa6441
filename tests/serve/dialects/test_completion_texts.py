"""Law of completions: whatever the tokenizer, prompt and answer, the text is decode(prompt + answer) less
decode(prompt), plain and streamed; offsets are indices into it, and each token's log-probability has its own name."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prompt import samples
from tests.serve.serving import Json
from tests.thorough import tries
from workbench.engine.outputs import StopChecker, detokenize
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import Request, SamplingParameters
from workbench.sampling.samplers import SampledToken
from workbench.serve.answers.answer_pieces import AnswerPieces
from workbench.serve.answers.pieces import Piece
from workbench.serve.call import Call
from workbench.serve.dialects.openai.completions import OpenAICompletions
from workbench.serve.served_model import PreparedPrompt
from workbench.trace.events import Decoded, Event, Finished, Prefilled, PromptLogprob

Prompt = str | list[int]


def ids_of_prompt(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    return [*tokenizer.bos_token_ids, *tokenizer.encode(prompt)] if isinstance(prompt, str) else prompt


def tops_of(tokenizer: Tokenizer, id: int, place: int) -> tuple[tuple[int, float], ...]:
    """Return alternatives, likeliest first: neighbours by id, with the token itself in some places only."""
    size = min(tokenizer.vocab_size, 6)
    return tuple(((id + n + place % 2) % tokenizer.vocab_size, -0.5 - n / 8) for n in range(size))


def pieces_of(tokenizer: Tokenizer, prompt: Prompt, answer: list[int], **more: Any) -> tuple[Call, list[Piece]]:
    """Return a call and the pieces of its answer, as the engine's events bring them."""
    echo, ids = more.get("echo", False), tuple(ids_of_prompt(tokenizer, prompt))
    sampling = SamplingParameters(max_tokens=len(answer), logprobs=6, stop=more.get("stop", ()))
    given, options = prompt if isinstance(prompt, str) else ids, {"tokens_as_ids": more.get("as_ids", False)}
    call = Call("c", "openai.completions", "m", (given,), sampling, echo=echo, options=options)
    request = Request("c", ids, sampling)
    checker, tops = StopChecker(request, tokenizer, (), 1 << 20), enumerate(answer)
    sampled = [SampledToken(id, dict(top := tops_of(tokenizer, id, n)).get(id, -9.0), top) for n, id in tops]
    scored = [PromptLogprob(id, -1.0 if place else None, ((id, -1.0),)) for place, id in enumerate(ids)]
    read = detokenize(checker, sampled)
    events: list[Event] = [Prefilled(0.0, "c", tokens=len(ids), computed=len(ids), logprobs=tuple(scored) * echo)]
    for each, text in zip(read.tokens, read.texts, strict=True):
        decoded = Decoded(0.0, "c", text, token_id=each.token_id, logprob=each.logprob, top_logprobs=each.top_logprobs)
        events.append(decoded)
    rest = checker.finish()
    events.append(Finished(0.0, "c", rest, reason="stop", token_ids=read.token_ids, ended_by=checker.cause.by))
    pieces = AnswerPieces(call, [PreparedPrompt(request)], tokenizer)
    return call, [*pieces.push(events), pieces.used]


def choice_of(tokenizer: Tokenizer, call: Call, pieces: list[Piece]) -> Json:
    """Return the one choice of the answer, and check that the stream's is the same."""
    model: Any = SimpleNamespace(tokenizer=tokenizer, fingerprint="f", name="m")
    (choice,) = OpenAICompletions().answer(call, model, pieces)["choices"]
    written = OpenAICompletions().writer(call, model).write(pieces)
    lines = [line.removeprefix("data: ") for line in written.decode().split("\n\n") if line][:-1]
    chunks = [each for line in lines for each in json.loads(line)["choices"]]
    assert "".join(each["text"] for each in chunks) == choice["text"]
    for name, values in choice["logprobs"].items():
        assert [value for each in chunks for value in each["logprobs"][name]] == values
    return choice


@pytest.mark.parametrize("name", samples.ALL)
@settings(max_examples=tries(40), deadline=None)
@given(data=st.data(), stops=samples.STOPS, echo=st.booleans(), as_ids=st.booleans())
def test_a_completion_is_what_its_tokens_add(
    name: str, data: st.DataObject, stops: tuple[str, ...], echo: bool, as_ids: bool
) -> None:
    tokenizer = samples.ALL[name]()
    ids = samples.ids_of(tokenizer).filter(bool)
    prompt: Prompt = data.draw(ids | samples.TEXTS.filter(lambda text: bool(ids_of_prompt(tokenizer, text))))
    answer = data.draw(ids)
    call, pieces = pieces_of(tokenizer, prompt, answer, stop=stops, echo=echo, as_ids=as_ids)
    choice = choice_of(tokenizer, call, pieces)
    before = ids_of_prompt(tokenizer, prompt)
    added = tokenizer.decode(before + answer)[len(tokenizer.decode(before)) :]
    stopped = samples.first_stop(added, stops)
    added = added[: stopped[0]] if stopped else added
    shown = [id for id in answer if not tokenizer.is_special(id)]
    length = len(tokenizer.decode(before, special=True))
    echoed = prompt if isinstance(prompt, str) else tokenizer.decode(before + shown, special=True)[:length]
    assert choice["text"] == echoed * echo + added
    found = choice["logprobs"]
    assert all(first <= second for first, second in pairwise(found["text_offset"]))
    assert all(0 <= offset <= len(choice["text"]) for offset in found["text_offset"])
    names, tops = (found[name][len(before) if echo else 0 :] for name in ("tokens", "top_logprobs"))
    for place, (id, token, top) in enumerate(zip(answer, names, tops, strict=False)):
        values = {id: -9.0, **dict(tops_of(tokenizer, id, place))}
        assert sorted(top.values()) == sorted(values.values()) and top[token] == values[id]


def spelt(tokenizer: Tokenizer, *entries: str) -> list[int]:
    names = {tokenizer.id_to_token(id): id for id in range(tokenizer.vocab_size)}
    return [names[each] for each in entries]


@pytest.mark.parametrize("echo", [False, True])
def test_the_space_before_an_answer_is_kept(echo: bool) -> None:
    tokenizer = samples.sentencepiece()
    call, pieces = pieces_of(tokenizer, "op", spelt(tokenizer, "▁stop", "op", "▁", "▁st"), echo=echo)
    choice = choice_of(tokenizer, call, pieces)
    assert choice["text"] == "op" * echo + " stopop  st"
    assert choice["logprobs"]["text_offset"][-4:] == [at + 2 * echo for at in (0, 5, 7, 8)]
    assert choice["logprobs"]["text_offset"][:-4] == [0, 0, 0][: 3 * echo]  # <s>, the space that is not shown, op
    call, pieces = pieces_of(tokenizer, "op", spelt(tokenizer, "▁stop", "op"), stop=(" st",))
    assert choice_of(tokenizer, call, pieces)["text"] == ""


@pytest.mark.parametrize("cut", range(1, 8))
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_count_characters_and_not_their_parts(cut: int, echo: bool) -> None:
    """Also where the prompt ends within a character: an echo shows it whole, and the answer begins behind it."""
    tokenizer = samples.byte_level()
    ids = tokenizer.encode("éa🙂b")
    call, pieces = pieces_of(tokenizer, ids[:cut], ids[cut:], echo=echo)
    choice = choice_of(tokenizer, call, pieces)
    begun = len(tokenizer.decode(ids[:cut]))
    places = [0, 0, 1, 2, 2, 2, 2, 3]
    assert choice["text"] == "éa🙂b"[0 if echo else begun :]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == (places if echo else [max(0, place - begun) for place in places[cut:]])
    assert choice["logprobs"]["tokens"] == ([r"bytes:\xc3", r"bytes:\xa9", "a", r"bytes:\xf0", r"bytes:\x9f",
                                             r"bytes:\x99", r"bytes:\x82", "b"][0 if echo else cut :])  # fmt: skip


def test_tokens_that_are_parts_of_characters_have_names_of_their_own() -> None:
    tokenizer = samples.byte_level()
    half = next(id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == b"\xe2")
    for as_ids, name in ((False, r"bytes:\xe2"), (True, f"token_id:{half}")):
        call, pieces = pieces_of(tokenizer, "a", [half], as_ids=as_ids)
        found = choice_of(tokenizer, call, pieces)["logprobs"]
        assert found["tokens"] == [name] and found["top_logprobs"][0][name] == -0.5


def test_tokens_behind_a_stop_have_its_place_in_a_stream_too() -> None:
    """Bytes that are no character are shown one by one, so a chunk has gone out before the stop string is whole."""
    tokenizer = samples.byte_level()
    ids = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size)}
    answer = [ids[bytes([byte])] for byte in (0x9B, 0x81, 0xD4, 0xE2, 0x4A)]
    for stop, offsets in (("?J", [0, 1, 2, 3, 3]), ("??J", [0, 1, 2, 2, 2]), ("??K", [0, 1, 2, 3, 4])):
        call, pieces = pieces_of(tokenizer, "a", answer, stop=(stop.replace("?", "\ufffd"),))
        assert choice_of(tokenizer, call, pieces)["logprobs"]["text_offset"] == offsets
