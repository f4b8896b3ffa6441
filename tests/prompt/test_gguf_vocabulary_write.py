"""A tokenizer's keys for llama.cpp: read back, they are the tokenizer; what they cannot say is refused by name.

That llama.cpp reads them so: tests/model/formats/test_llama_cpp.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings

from tests.prompt.hard_strings import HARD, TEXTS
from tests.prompt.vocabularies import CONTROLS, byte_level, trained_pieces
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.prompt.tokenization.byte_level import PRE_TOKENIZERS
from workbench.prompt.tokenization.gguf_vocabulary import WHOLE_KEY, GGUFVocabulary
from workbench.prompt.tokenization.gguf_vocabulary_write import vocabulary_metadata
from workbench.prompt.tokenization.sentencepiece_model import read_model_file
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.prompt.tokenization.tokenizer_files import read_tokenizer

MARKS = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def pieces(folder: Path, kind: str = "bpe as Llama") -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(trained_pieces(kind))
    found = read_tokenizer(folder)
    assert found is not None
    return found


def changed(tokenizer: Tokenizer, **changes: Any) -> Tokenizer:
    """Return a tokenizer with other values in its tokenizer.json; those of `model` replace some of the model's."""
    state = json.loads(tokenizer.to_json())
    state["model"] |= changes.pop("model", {})
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state | changes)))


def read_back(tokenizer: Tokenizer, rows: int, whole: bool) -> Tokenizer:
    keys, _ = vocabulary_metadata(tokenizer, rows)
    assert (WHOLE_KEY in keys) == whole
    keys.pop(WHOLE_KEY, None)
    found = GGUFVocabulary(keys, "a.gguf").tokenizer()
    assert found is not None and found.vocab_size == rows
    return found


def assert_same(found: Tokenizer, right: Tokenizer, only_words: bool = False) -> None:
    def law(text: str) -> None:
        if not only_words or not text.startswith((" ", "▁")):
            assert found.encode(text) == right.encode(text)
        assert only_words or found.encode(text, special=True) == right.encode(text, special=True)

    for text in [*HARD, "a<own>b<|end|>", "<s>a</s> b"]:
        law(text)
    settings(max_examples=tries(60))(given(TEXTS)(law))()
    assert found.bos_token_ids == right.bos_token_ids and found.special_token_ids == right.special_token_ids


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_vocabularies(pre: str) -> None:
    """With rows for ids without an entry."""
    right = byte_level(pre)
    assert_same(read_back(right, right.vocab_size + 5, whole=False), right)


@pytest.mark.parametrize("kind", ["bpe as Llama", "bpe without a dummy prefix", "bpe with defined symbols"])
def test_sentencepiece_vocabularies(tmp_path: Path, kind: str) -> None:
    right = pieces(tmp_path, kind)
    assert_same(read_back(right, right.vocab_size, whole=False), right)
    keys, notes = vocabulary_metadata(right, right.vocab_size)
    model = read_model_file(tmp_path / "tokenizer.model")
    assert keys["tokenizer.ggml.token_type"] == model.kinds
    assert [text.replace(" ", "▁") for text in keys["tokenizer.ggml.tokens"]] == model.pieces
    assert ("defined symbols" in kind) == bool(notes)


@pytest.mark.parametrize("scheme", ["always", "first", "never", "Gemma"])
def test_forms_of_hugging_face_files(tmp_path: Path, scheme: str) -> None:
    """Spaces are marked by the cut of words (Llama's files without `legacy`), or as in Gemma's.

    The whole tokenizer.json stands beside the keys. A cut that puts a space before a text does so where none is yet.
    """
    if scheme == "Gemma":
        step: Any = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        right = changed(pieces(tmp_path), normalizer=MARKS, pre_tokenizer=step)
    else:
        step = {"type": "Metaspace", "replacement": "▁", "split": False, "prepend_scheme": scheme}
        right = changed(pieces(tmp_path), normalizer=None, pre_tokenizer=step)
    prefix = scheme in ("always", "first")
    assert len(vocabulary_metadata(right, right.vocab_size)[1]) == prefix
    assert_same(read_back(right, right.vocab_size, whole=True), right, prefix)


def test_fill_ups_are_no_entries_that_are_there() -> None:
    right = byte_level("gpt-2")
    state = json.loads(right.to_json())
    token = {**state["added_tokens"][-1], "content": f"[PAD{right.vocab_size + 1}]", "id": right.vocab_size}
    right = changed(right, added_tokens=[*state["added_tokens"], token])
    found = read_back(right, right.vocab_size + 3, whole=False)
    assert found.encode(token["content"]) == [token["id"]]
    assert len({found.id_to_token(id) for id in range(found.vocab_size)}) == found.vocab_size


def added(tokenizer: Tokenizer, **changes: Any) -> list[dict[str, Any]]:
    state = json.loads(tokenizer.to_json())["added_tokens"]
    return [*state[:-1], {**state[-1], **changes}]


def test_what_has_no_keys(tmp_path: Path) -> None:
    words, marks = byte_level("gpt-2"), pieces(tmp_path)
    begin = [{"SpecialToken": {"id": name, "type_id": 0}} for name in CONTROLS]
    before = {
        "type": "TemplateProcessing", "single": [*begin, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
        "special_tokens": {name: {"id": name, "ids": [words.special_token_ids[name]], "tokens": [name]}
                           for name in CONTROLS},
    }  # fmt: skip
    byte_level_step = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    merges = json.loads(marks.to_json())["model"]["merges"]
    cases: list[tuple[Tokenizer, str]] = [
        (changed(words, pre_tokenizer=byte_level_step), "GGUF has no name for the pattern that splits its words"),
        (changed(words, normalizer={"type": "Lowercase"}), "GGUF has no name for the pattern that splits its words"),
        (changed(words, added_tokens=added(words, rstrip=True)), "'<own>' takes spaces after it"),
        (changed(words, post_processor=before), "it puts 2 tokens before a text"),
        (changed(words, decoder=None), "depends on the tokens around it"),
        (changed(marks, model={"byte_fallback": False}), "no bytes for characters"),
        (changed(marks, normalizer={"type": "NFKC"}), "it changes a text in more ways"),
        (changed(marks, model={"merges": merges[1:]}), "its merges do not follow from a score for each piece"),
        (pieces(tmp_path, "bpe with NFKC"), "it changes a text in more ways"),
        (pieces(tmp_path, "unigram"), "its model is Unigram"),
    ]
    for tokenizer, message in cases:
        with pytest.raises(WorkbenchError, match=message):
            vocabulary_metadata(tokenizer, tokenizer.vocab_size)
    with pytest.raises(WorkbenchError, match=f"it has {words.vocab_size} ids; the model's embedding has 4 rows"):
        vocabulary_metadata(words, 4)
