"""A text as its tokens: nothing of it is lost, and nothing of it becomes markup."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.widgets.canned import is_golden
from workbench.engine.loaded_model import BUNDLED_MODELS, DEMO_FOLDER
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.widgets import TokenView
from workbench.widgets.tokens.picture import MAX_TOKENS, Tokenization, TokenizedPiece, draw_tokenizations

TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


@pytest.fixture(scope="module")
def view() -> TokenView:
    return TokenView(tokenizer="demo", beside="bytes")


@given(TEXTS)
@example("")
@example("<b>& \"'</b>")
@example("naïve 你好 👋🏽\n\tx<|end|>")
def test_the_pieces_of_both_are_the_text(view: TokenView, text: str) -> None:
    view.text = text
    demo, single = view.sides
    for side in (demo, single):
        assert b"".join(cut.bytes for cut in side.tokens) == text.encode()
        assert not any(cut.control for cut in side.tokens)
    assert len(single.tokens) == len(text.encode()) and all(len(cut.bytes) == 1 for cut in single.tokens)
    if text:
        assert demo.characters_per_token == len(text) / len(demo.tokens)
        assert demo.characters_per_token >= (single.characters_per_token or 0)  # type: ignore
        assert single.bytes_per_token == 1


def test_ids_are_those_of_the_tokenizer(view: TokenView) -> None:
    view.text = "def f(x):\n    return x"
    tokenizer = Tokenizer.from_folder(BUNDLED_MODELS["demo"])
    assert tokenizer is not None and [cut.id for cut in view.sides[0].tokens] == tokenizer.encode(view.text)
    view.throttle.flush()
    assert view.shown.content == view.picture() and view.shown.content.count("<br>") == 2


def test_a_tokenizer_may_be_given_in_several_ways() -> None:
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER / "bytes")
    assert tokenizer is not None
    ways = (tokenizer, DEMO_FOLDER / "bytes", str(DEMO_FOLDER / "bytes"), "bytes")
    assert len({TokenView("né", way).sides[0].tokens for way in ways}) == 1


def test_a_text_that_is_none_is_reported_and_nothing_is_lost(view: TokenView) -> None:
    view.text = "a\ud800"
    assert 'role="alert"' in view.picture() and "lone surrogate" in view.picture()
    view.text = "a"
    assert "alert" not in view.picture()


def test_a_long_text_is_drawn_as_far_as_can_be_read() -> None:
    drawn = draw_tokenizations([Tokenization("x", 9, 3000, (TokenizedPiece(1, b"a", "a"),) * (MAX_TOKENS + 1000))])
    assert drawn.count("<b ") == MAX_TOKENS and "and 1,000 more" in drawn and "3,000" in drawn


def test_a_picture_of_pieces_their_bytes_and_a_control_token(view: TokenView) -> None:
    view.text = "<b>é\n\tx</b>"
    control = Tokenization("x", 9, 5, (TokenizedPiece(0, b"<|end|>", "<|end|>", True),))
    assert is_golden("tokens", view.picture() + draw_tokenizations([control]))
