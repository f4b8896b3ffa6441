"""Byte-level BPE from ranks, from `tekken.json` and by the pre-tokenizers' names: equal to tiktoken, mistral-common and
transformers' own tokenizers."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prompt.hard_strings import HARD, TEXTS
from tests.prompt.vocabularies import CONTROLS, trained_merges
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.prompt.tokenization.byte_level import (
    GPT4O,
    LLAMA3,
    PRE_TOKENIZERS,
    QWEN2,
    TEKKEN,
    PreTokenizer,
    byte_level_tokenizer,
    in_byte_alphabet,
    merges_of_ranks,
)
from workbench.prompt.tokenization.tekken import CONTROL_TOKENS, read_tekken
from workbench.prompt.tokenization.tokenizer import BYTE_OF, Tokenizer
from workbench.prompt.tokenization.tokenizer_files import read_tokenizer


def ranks() -> dict[bytes, int]:
    """The same entries as tiktoken's ranks: bytes first, then in the order of their merges."""
    entries, merges = trained_merges()
    spelled = [bytes(BYTE_OF[letter] for letter in entry) for entry in entries]
    made = {bytes(BYTE_OF[letter] for letter in left + right): at for at, (left, right) in enumerate(merges)}
    ordered = sorted(spelled, key=lambda data: (len(data) > 1, made.get(data, 0), data))
    return {data: rank for rank, data in enumerate(ordered)}


def from_ranks(pattern: str) -> Tokenizer:
    entries = [*map(in_byte_alphabet, ranks()), *CONTROLS]
    pre, special = PreTokenizer((pattern,), ignore_merges=True), range(len(entries) - 2, len(entries))
    return Tokenizer(byte_level_tokenizer(entries, merges_of_ranks(ranks()), pre, special))


@pytest.mark.parametrize("pattern", [LLAMA3, QWEN2, GPT4O, TEKKEN], ids=["llama3", "qwen2", "gpt4o", "tekken"])
def test_ranks_are_tiktokens(pattern: str) -> None:
    """Words, merges and bytes are those of another engine with the same pattern."""
    tiktoken = pytest.importorskip("tiktoken", reason="the yardstick: pip install tiktoken")
    theirs = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks(), special_tokens={})
    ours = from_ranks(pattern)

    def check(text: str) -> None:
        ids = theirs.encode(text, disallowed_special=())
        assert ours.encode(text) == ids and ours.decode(ids) == theirs.decode(ids) == text

    for text in HARD:
        check(text)
    settings(max_examples=tries(150), deadline=None)(given(TEXTS)(check))()


@pytest.mark.parametrize(
    ("pre", "name"),
    [("gpt-2", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer"), ("command-r", "CohereTokenizer")],
)
def test_pre_tokenizers_are_transformers(pre: str, name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'transformers>=5'")
    entries, merges = trained_merges()
    entries = [*entries, *CONTROLS]
    vocab = {entry: id for id, entry in enumerate(entries)}
    names = {"unk_token": "<|end|>", "bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    theirs = getattr(transformers, name)(vocab=vocab, merges=list(merges), **names)
    special = range(len(entries) - 2, len(entries))
    ours = Tokenizer(byte_level_tokenizer(entries, merges, PRE_TOKENIZERS[pre], special))
    for text in HARD:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False, split_special_tokens=True), text


def test_named_pre_tokenizers_cut_as_their_digits_rule_says() -> None:
    """A number of seven digits, under each name."""
    lengths = {
        name: [len(word) for word, _ in pre.steps().pre_tokenize_str("1234567")] for name, pre in PRE_TOKENIZERS.items()
    }
    threes = {"llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "gpt-4o",
              "llama4", "deepseek-v3", "hunyuan-dense"}  # fmt: skip
    whole = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "bloom", "poro-chat", "gpt3-finnish"}
    for name, found in lengths.items():
        assert found == ([3, 3, 1] if name in threes else [7] if name in whole else [1] * 7), name


def small_tekken(**changes: Any) -> dict[str, Any]:
    fixed = {"token_str": None}
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(data).decode(), **fixed} for data, rank in ranks().items()]
    config = {"pattern": TEKKEN, "num_vocab_tokens": len(vocab), "default_vocab_size": len(vocab) + 20,
              "default_num_special_tokens": 20, "version": "v3"}  # fmt: skip
    return {"config": config, "vocab": vocab, **changes}


def test_tekken_is_mistral_commons(tmp_path: Path) -> None:
    package = pytest.importorskip("mistral_common", reason="the yardstick: pip install mistral-common")
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    small = tmp_path / "tekken.json"
    small.write_text(json.dumps(small_tekken()))
    real = Path(package.__file__).parent / "data" / "tekken_240911.json"
    for path in (small, real):
        theirs, ours = Tekkenizer.from_file(path), Tokenizer(read_tekken(path))
        assert ours.vocab_size == theirs.n_words and ours.bos_token_ids == (theirs.bos_id,)
        for text in HARD:
            ids = theirs.encode(text, bos=False, eos=False)
            assert ours.encode(text) == ids, text
            assert ours.decode(ids) == text
    found = read_tokenizer(tmp_path)
    assert found is not None and found.special_token_ids["</s>"] == CONTROL_TOKENS.index("</s>")


@settings(max_examples=tries(100), deadline=None)
@given(data=st.data())
def test_a_damaged_tekken_is_one_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged_tekken.json"
    good = json.dumps(small_tekken())
    start, length = data.draw(st.integers(0, len(good))), data.draw(st.integers(1, 40))
    inserted = data.draw(st.text(st.characters(codec="ascii"), max_size=6))
    path.write_text(good[:start] + inserted + good[start + length :])
    try:
        read_tekken(path)
    except WorkbenchError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {}}, {"vocab": []}, {"vocab": [{"rank": 1, "token_bytes": "AA=="}]}, {"vocab": None},
        {"vocab": [{"rank": 0, "token_bytes": "%%"}]}, {"special_tokens": [{"rank": 0}]}, {"config": None},
    ],
)  # fmt: skip
def test_what_is_no_tekken(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(small_tekken(**changes)))
    with pytest.raises(WorkbenchError, match="tekken"):
        read_tokenizer(tmp_path)
