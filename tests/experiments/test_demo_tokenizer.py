from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner

from experiments import demo_tokenizer
from workbench.prompt.tokenization.tokenizer import Tokenizer

SOURCE = "class Example:\n    def method(self, value=1234):\n\n        return value  # naïve\n"
TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.text(st.sampled_from(list(" \n\r\tab1é🙂.")))


@cache
def trained() -> Tokenizer:
    return Tokenizer(demo_tokenizer.train([SOURCE * 3], 300))


@cache
def bytes_only() -> Tokenizer:
    return Tokenizer(demo_tokenizer.bytes_only())


@given(text=TEXT)
def test_one_id_a_byte_and_back(text):
    ids = bytes_only().encode(text)
    assert len(ids) == len(text.encode()) and bytes_only().decode(ids) == text
    assert b"".join(map(bytes_only().token_bytes, ids)) == text.encode()


@given(text=TEXT)
def test_the_trained_one_gives_every_text_back(text):
    ids = trained().encode(text)
    assert trained().decode(ids) == text and len(ids) <= len(text.encode())


@pytest.mark.parametrize("make", [trained, bytes_only])
def test_control_tokens_come_first_in_both(make):
    assert [make().special_token_ids[name] for name in demo_tokenizer.CONTROL] == list(range(10))
    assert demo_tokenizer.CONTROL[:3] == (demo_tokenizer.BEGIN, demo_tokenizer.END, demo_tokenizer.PAD)
    assert make().encode("<|user|>hi<|turn|>", special=True)[0] == demo_tokenizer.CONTROL.index("<|user|>")


@given(before=st.sampled_from(["x:", "x:\n", "\n\n", ")\r\n"]), text=TEXT)
def test_a_line_end_never_merges_with_the_indentation_after_it(before, text):
    """So a prompt that stops at a line end is continued as the training text was."""
    whole = trained().encode(before + "\n    y" + text)
    assert whole[: len(trained().encode(before + "\n"))] == trained().encode(before + "\n")


def test_training_makes_as_many_entries_as_asked_and_the_same_each_time():
    assert trained().vocab_size == 300
    once, again = (demo_tokenizer.train([SOURCE * 3], 300).to_str() for _ in range(2))
    assert once == again


def test_what_is_saved_is_what_is_loaded(tmp_path):
    for inner in (demo_tokenizer.bytes_only(), demo_tokenizer.train([SOURCE], 280)):
        inner.save(str(tmp_path / "tokenizer.json"))
        loaded = demo_tokenizer.load(tmp_path / "tokenizer.json")
        assert isinstance(loaded, Inner) and loaded.to_str() == inner.to_str()
        assert loaded.encode(SOURCE).ids == inner.encode(SOURCE).ids
