"""Tokenizers and chat templates in GGUF files: equal to what their metadata were written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.prompt.hard_strings import HARD
from tests.prompt.vocabularies import TEMPLATE, byte_level, gguf_byte_level, trained_merges, trained_pieces
from workbench.errors import WorkbenchError
from workbench.model.formats.texts import open_chat_template, open_tokenizer, save_texts
from workbench.prompt.tokenization.byte_level import PRE_TOKENIZERS

gguf = pytest.importorskip("gguf", reason="the writer of the files: pip install gguf")


def write(path: Path, changes: dict[str, Any] | None = None, **values: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {**values, **(changes or {})}.items():
        add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}
        if value is not None:
            add[type(value)](key if "." in key else f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pieces(kind: str) -> dict[str, Any]:
    """As llama.cpp's converter writes them: a defined symbol with spaces for its marks."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="the yardstick: pip install sentencepiece")
    model = sentencepiece.SentencePieceProcessor(model_proto=trained_pieces(kind))
    kinds = []
    for id in range(model.get_piece_size()):
        found = (model.is_unknown(id), model.is_control(id), False, model.is_unused(id), model.is_byte(id))
        kinds.append(next((kind for kind, each in enumerate(found, start=2) if each), 1))
    return {
        "model": "llama", "pre": "default", "tokens": [model.id_to_piece(id) for id in range(len(kinds))],
        "scores": [model.get_score(id) for id in range(len(kinds))], "token_type": kinds,
        "bos_token_id": model.bos_id(), "eos_token_id": model.eos_id(), "unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_vocabularies(tmp_path: Path, pre: str) -> None:
    values = gguf_byte_level(pre)
    ours = open_tokenizer(write(tmp_path / "a.gguf", **values))
    theirs, count = byte_level(pre), len(trained_merges()[0])
    assert ours is not None and ours.vocab_size == count + 3
    for text in [*HARD, "x<own>y", "<|end|>"]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, special=True) == theirs.encode(text, special=True)
    assert ours.encode("a<own>b")[1] == count + 2
    begins = pre in ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
    assert ours.bos_token_ids == ((count,) if begins else ())
    changed = open_tokenizer(write(tmp_path / "b.gguf", {"add_bos_token": not begins}, **values))
    assert changed is not None and changed.bos_token_ids == (() if begins else (count,))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("bpe as Llama", {}), ("bpe without a dummy prefix", {"add_space_prefix": False})],
)
def test_sentencepiece_vocabularies(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """llama.cpp merges as sentencepiece does; unknown characters become bytes."""
    import sentencepiece

    ours = open_tokenizer(write(tmp_path / "a.gguf", changes, **pieces(kind)))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained_pieces(kind))
    assert ours is not None
    for text in HARD:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.bos_token_ids == (theirs.bos_id(),)
    assert ours.special_token_ids == {"<s>": 1, "</s>": 2, "<unk>": 0}


def test_the_chat_template_has_the_names_of_its_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", **gguf_byte_level("gpt-2"))
    template, tokenizer = open_chat_template(path), open_tokenizer(path)
    assert template is not None and tokenizer is not None
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages) == "<|begin|>[user] hi<|end|>"
    assert template.ids(messages, tokenizer)[0] == tokenizer.special_token_ids["<|begin|>"]
    without = write(tmp_path / "b.gguf", {"tokenizer.chat_template": None}, **gguf_byte_level("gpt-2"))
    assert open_chat_template(without) is None


def test_templates_by_name_are_read_and_kept(tmp_path: Path) -> None:
    """gguf-py writes the templates of a model that has several as keys behind that of the default one."""
    texts = {"tool_use": "{{ tools | tojson }}" + TEMPLATE, "rag": "rag"}
    named = {f"tokenizer.chat_template.{name}": text for name, text in texts.items()}
    path = write(tmp_path / "a.gguf", named, **gguf_byte_level("gpt-2"))
    template = open_chat_template(path)
    assert template is not None and {*template.texts} == {"default", "tool_use", "rag"}
    assert (template.choose(tools=True), template.choose()) == ("tool_use", "default")
    assert template.render([{"role": "user", "content": "hi"}], tools=[{"a": 1}]).startswith('[{"a": 1}]<|begin|>')
    (tmp_path / "folder").mkdir()
    save_texts(path, tmp_path / "folder")
    again = open_chat_template(tmp_path / "folder")
    assert again is not None and again.texts == template.texts
    del named["tokenizer.chat_template.rag"]
    alone = write(tmp_path / "b.gguf", {"tokenizer.chat_template": None, **named}, **gguf_byte_level("gpt-2"))
    found = open_chat_template(alone)
    assert found is not None and {*found.texts} == {"tool_use"}


def test_files_beside_a_gguf_file_go_first(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", **gguf_byte_level("gpt-2"))
    found = open_tokenizer(tmp_path)
    assert found is not None and found.vocab_size == len(trained_merges()[0]) + 3
    (tmp_path / "tokenizer.model").write_bytes(trained_pieces("bpe as Llama"))
    found = open_tokenizer(tmp_path)
    assert found is not None and found.vocab_size == 420


def test_no_vocabulary(tmp_path: Path) -> None:
    assert open_tokenizer(write(tmp_path / "a.gguf", model="no_vocab")) is None
    assert open_tokenizer(write(tmp_path / "b.gguf")) is None
    assert open_chat_template(tmp_path / "a.gguf") is None
    assert open_tokenizer(tmp_path / "nowhere") is None


def test_fill_ups_of_a_vocabulary_keep_their_ids(tmp_path: Path) -> None:
    values = gguf_byte_level("gpt-2")
    values["tokens"] += ["[PAD]", "[PAD]", "a"]
    values["token_type"] += [5, 5, 5]
    found = open_tokenizer(write(tmp_path / "a.gguf", **values))
    assert found is not None and found.vocab_size == len(values["tokens"])
    assert found.encode("a") == [values["tokens"].index("a")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; it must be llama or gpt2"),
        ({"pre": "qwen-2"}, "tokenizer.ggml.pre is 'qwen-2'.*did you mean 'qwen2'"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"pre": "default"}, "tokenizer.ggml.pre is 'default'"),
        ({"merges": ["a b", "ab"]}, "entry 1 is 'ab', not two entries"),
        ({"merges": ["zz yy"]}, "cannot be built"),
        ({"merges": [1, 2]}, "must be an array of str"),
        ({"token_type": [1, 1]}, "tokens and 2 token types"),
        ({"bos_token_id": "a"}, "bos_token_id is 'a'"),
        ({"add_bos_token": 7}, "add_bos_token is 7; it must be true or false"),
        ({"model": "llama"}, "and 0 scores"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkbenchError, match=message):
        open_tokenizer(write(tmp_path / "a.gguf", changes, **gguf_byte_level("llama-bpe")))


def test_a_token_of_a_megabyte_is_refused(tmp_path: Path) -> None:
    changes = {"model": "llama", "tokens": ["<s>", "a" * 1_000_000], "scores": [0.0, 0.0], "token_type": [3, 1]}
    with pytest.raises(WorkbenchError, match=r"a.gguf: token 1 has 1,000,000 characters; at most 1,000"):
        open_tokenizer(write(tmp_path / "a.gguf", changes))
