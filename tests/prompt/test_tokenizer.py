from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from experiments import demo_tokenizer
from tests.prompt import samples
from workbench.errors import WorkbenchError
from workbench.prompt.tokenization.tokenizer import Tokenizer


@given(text=samples.TEXTS)
def test_text_comes_back(text):
    for make in (samples.byte_level, samples.trained):
        tokenizer = make()
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=samples.TEXTS)
def test_text_comes_back_through_sentencepiece_but_for_its_own_space_sign(text):
    tokenizer = samples.sentencepiece()
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


@given(text=samples.TEXTS)
@pytest.mark.parametrize("name", ["byte_level", "trained", "sentencepiece"])
def test_no_prompt_can_forge_a_control_token(name, text):
    tokenizer = samples.BY_BYTES[name]()
    for control in tokenizer.special_token_ids:
        forged = text + control
        assert not any(map(tokenizer.is_special, tokenizer.encode(forged)))
        assert tokenizer.encode(forged, special=True)[-1] == tokenizer.special_token_ids[control]


@given(parts=st.lists(samples.UNICODE | st.sampled_from(demo_tokenizer.CONTROL)))
def test_control_tokens_come_back_when_they_are_kept(parts):
    text = "".join(parts)
    tokenizer = samples.byte_level()
    ids = tokenizer.encode(text, special=True)
    assert tokenizer.decode(ids, special=True) == text
    assert tokenizer.decode(ids) == tokenizer.decode([id for id in ids if not tokenizer.is_special(id)])


def test_an_inner_model_that_finds_control_tokens_in_plain_text_is_not_let():
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("a", -1.0), ("<", -1.0), ("s", -1.0), (">", -1.0)]
    inner = Inner(models.Unigram(pieces, 0, False))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(inner)
    assert tokenizer.encode("a<s>a<s>") == [2, 3, 4, 5, 2, 3, 4, 5]
    assert tokenizer.decode(tokenizer.encode("a<s>a<s>")) == "a<s>a<s>"
    assert tokenizer.encode("a<s>", special=True) == [2, 1]


@given(ids=st.data())
@pytest.mark.parametrize("name", ["byte_level", "trained"])
def test_byte_level_decoding_is_the_librarys_own_also_of_broken_bytes(name, ids):
    tokenizer = samples.BY_BYTES[name]()
    below_added = st.integers(0, tokenizer.vocab_size - 2)
    drawn = ids.draw(st.lists(below_added, max_size=30))
    assert tokenizer.decode(drawn) == tokenizer._inner.decode(drawn)


@given(text=samples.TEXTS, controls=st.lists(st.integers(0, 2), max_size=3))
def test_sentencepiece_decoding_is_the_librarys_own(text, controls):
    tokenizer = samples.sentencepiece()
    ids = [*controls, *tokenizer.encode(text), *controls]
    assert tokenizer.decode(ids) == tokenizer._inner.decode(ids)


@given(data=st.data())
@pytest.mark.parametrize("name", samples.BY_BYTES)
def test_bytes_of_tokens_joined_are_the_bytes_of_the_text(name, data):
    tokenizer = samples.BY_BYTES[name]()
    text = data.draw(samples.TEXTS.filter(lambda text: "▁" not in text))
    joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
    lead = b" " if name == "sentencepiece" and text else b""
    assert joined == lead + text.encode()


def test_bytes_of_single_tokens():
    tokenizer = samples.sentencepiece()
    assert tokenizer.token_bytes(3 + 0x0A) == b"\n"
    assert tokenizer.token_bytes(1) == b"<s>"
    (stop,) = tokenizer.encode("stop")
    assert tokenizer.id_to_token(stop) == "▁stop" and tokenizer.token_bytes(stop) == b" stop"
    single = {samples.byte_level().token_bytes(id) for id in range(len(demo_tokenizer.CONTROL), 266)}
    assert single == {bytes([byte]) for byte in range(256)}
    assert samples.trained().token_bytes(340) == "été".encode()


def test_added_tokens_keep_their_text():
    tokenizer = samples.trained()
    ids = tokenizer.encode("xétéx")
    assert 340 in ids and tokenizer.decode(ids) == "xétéx"


def test_what_it_says_of_itself():
    tokenizer = samples.sentencepiece()
    assert tokenizer.special_token_ids == {"<unk>": 0, "<s>": 1, "</s>": 2}
    assert tokenizer.bos_token_ids == (1,)
    assert samples.byte_level().bos_token_ids == ()
    assert samples.trained().vocab_size == 341  # the added token is counted
    assert samples.byte_level().vocab_size == 266
    assert repr(samples.byte_level()) == "Tokenizer(byte-level, vocab=266, control=10)"
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""
    assert tokenizer.decode(np.array([259, 3 + 65])) == "A"


def test_ids_with_a_gap_need_an_embedding_that_reaches_the_last():
    inner = Inner(models.BPE(vocab={"a": 0, "b": 7}, merges=[]))
    inner.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(inner)
    assert tokenizer.vocab_size == 8
    assert tokenizer.decode([0, 3, 7]) == "ab" and tokenizer.token_bytes(3) == b""


@pytest.mark.parametrize("id", [-1, 266, 2**40])
def test_an_id_out_of_range_is_named_with_the_range(id):
    with pytest.raises(WorkbenchError, match=rf"token id {id} is out of range.*0 to 265"):
        samples.byte_level().decode([30, id])
    with pytest.raises(WorkbenchError, match="out of range"):
        samples.byte_level().token_bytes(id)


def test_a_tokenizer_that_does_not_match_the_vocabulary():
    samples.byte_level().check_vocab_size(266)
    samples.byte_level().check_vocab_size(300)  # padded embeddings are usual
    with pytest.raises(WorkbenchError, match="does not match the vocabulary.*ids go to 265.*ends at 264"):
        samples.byte_level().check_vocab_size(265)


def test_a_lone_surrogate_is_refused_with_its_place():
    with pytest.raises(WorkbenchError, match=r"character 2: the lone surrogate U\+DC80"):
        samples.byte_level().encode("ab\udc80c")


def test_folders_with_and_without(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None
    demo_tokenizer.bytes_only().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None and tokenizer.decode(tokenizer.encode("naïve\n")) == "naïve\n"
    with pytest.raises(WorkbenchError, match="nothing.json: no such file"):
        Tokenizer.from_file(tmp_path / "nothing.json")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_cut_off_file_is_named_with_the_remedy(tmp_path, share):
    path = tmp_path / "tokenizer.json"
    whole = demo_tokenizer.bytes_only().to_str().encode()
    path.write_bytes(whole[: int(len(whole) * share)])
    expected = r"tokenizer\.json: no readable tokenizer.*copy tokenizer\.json"
    with pytest.raises(WorkbenchError, match=expected) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b"{}", b"[1]", b'{"model": {"type": "Wrong"}}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(WorkbenchError, match="no readable tokenizer"):
        Tokenizer.from_file(path)
    with pytest.raises(WorkbenchError, match="no readable tokenizer"):
        Tokenizer.from_file(tmp_path)  # a folder


def test_truncation_and_padding_of_the_training_are_switched_off(tmp_path):
    inner = demo_tokenizer.bytes_only()
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["truncation"]
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    assert len(tokenizer.encode("a" * 100)) == 100 and len(tokenizer.encode("a")) == 1


@pytest.mark.parametrize("name", samples.BY_WINDOW)
def test_other_decoders_are_the_librarys(name):
    tokenizer = samples.BY_WINDOW[name]()
    assert tokenizer.byte_rule is None
    ids = list(range(tokenizer.vocab_size))
    assert tokenizer.decode(ids) == tokenizer._inner.decode(ids)


def test_the_alphabet_is_the_librarys():
    vocab = {character: id for id, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    inner = Inner(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.Sequence([decoders.ByteLevel()])
    text = "".join(map(chr, range(0x250)))
    tokenizer = Tokenizer(inner)
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
