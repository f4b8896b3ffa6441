"""No text of a user's is read as a control token, whatever the tokenizer's normalizer makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prompt import look_alikes
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenization.tokenizer import Tokenizer


def controls_of(tokenizer: Tokenizer, text: str) -> set[int] | None:
    """Control tokens in a plain text but for that of unknown characters; None where the text is refused."""
    unknown = tokenizer.special_token_ids[look_alikes.UNKNOWN]
    try:
        return {id for id in tokenizer.encode(text) if tokenizer.is_special(id)} - {unknown}
    except WorkbenchError as error:
        assert "can only read them as its control token" in str(error)
        return None


@settings(max_examples=tries(400), deadline=None)
@given(text=look_alikes.texts, inner=look_alikes.tokenizers_of)
def test_no_look_alike_is_read_as_a_control_token(text: str, inner: Any) -> None:
    assert not controls_of(Tokenizer(inner), text)


@pytest.mark.parametrize("pre", look_alikes.PRE_TOKENIZERS)
@pytest.mark.parametrize("model", look_alikes.MODELS)
def test_every_control_token_under_every_normalizer(model: str, pre: str) -> None:
    """As they are written, and in every other way that the texts of this law know."""
    for name in look_alikes.NORMALIZERS:
        for normalized in (False, True):
            tokenizer = Tokenizer(look_alikes.inner(model, [name], pre, normalized))
            for control in tokenizer.special_token_ids:
                for way in look_alikes.WAYS:
                    assert not controls_of(tokenizer, f"a {way(control)} b{way(control)}"), (name, control)


def test_the_law_sees_look_alikes() -> None:
    """The library by itself reads some of these texts as control tokens: there is something to refuse."""
    met = set()
    for name in look_alikes.NORMALIZERS:
        inner = look_alikes.inner("unigram", [name], "none", False)
        inner.encode_special_tokens = True
        for control in look_alikes.CONTROLS:
            texts = [way(control) for way in look_alikes.WAYS] + [look_alikes.FORGES_ALONE]
            if any(id in range(1, 1 + len(look_alikes.CONTROLS)) for t in texts for id in inner.encode(t).ids):
                met.add(name)
    assert {"NFKC", "NFKD", "Lowercase", "BertNormalizer", "Replace", "ReplaceRegex", "StripAccents", "Nmt"} <= met


def test_a_character_that_is_a_control_token_is_refused() -> None:
    tokenizer = Tokenizer(look_alikes.inner("unigram", ["Replace"], "none", False))
    with pytest.raises(WorkbenchError, match=r"characters 1 to 2 .'☃'.: .* control token '</s>'; take them out"):
        tokenizer.encode("a☃b")


def test_unknown_characters_stay_what_they_were() -> None:
    """A run of them is one token where the model has it so, and is not cut."""
    tokenizer = Tokenizer(look_alikes.inner("words", [], "Whitespace", False))
    assert tokenizer.encode("zzz zzzz") == [0, 0] and tokenizer.encode("zzz </s> zzzz", special=True) == [0, 1, 0]


@given(count=st.integers(1, 3))
def test_many_of_them_cost_no_recursion(count: int) -> None:
    tokenizer = Tokenizer(look_alikes.inner("unigram", ["NFKC"], "none", False))
    text = "a＜/s＞" * count
    assert tokenizer.encode(text * 1000) == tokenizer.encode(text) * 1000


FRAMED = ChatTemplate("</s>{{ messages[0].content }}<|im_end|>{{ messages[0].content }}", {})


@settings(max_examples=tries(400), deadline=None)
@given(text=look_alikes.texts, inner=look_alikes.tokenizers_of)
def test_a_template_writes_control_tokens_around_any_text(text: str, inner: Any) -> None:
    """Those of the template are read, in their order, and no others: what normalizers make of the text is text.

    Tokens that are looked for after normalizing may be missed: some normalizers hide them, and the library too."""
    normalized = any(token.normalized for token in inner.get_added_tokens_decoder().values())
    tokenizer = Tokenizer(inner)
    message = {"role": "user", "content": text}
    try:
        found = [token.id for token in FRAMED.encode(FRAMED.render([message]), tokenizer)]
    except WorkbenchError as error:
        assert "can only read it as its control token" in str(error)
        return
    unknown = tokenizer.special_token_ids[look_alikes.UNKNOWN]
    written = [tokenizer.special_token_ids[name] for name in ("</s>", "<|im_end|>")]
    read = [id for id in found if tokenizer.is_special(id) and id != unknown]
    assert read == written or (normalized and read in ([], written[:1], written[1:]))
