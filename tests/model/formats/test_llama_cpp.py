"""GGUF files of our own in llama.cpp: the same token ids of a text, and the same logits."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.families import GGUF_CASES, NEEDS_TRANSFORMERS, WIDE, draw_ids, logits_of, read_model
from tests.model.formats.ask_llama_cpp import ask
from tests.prompt.hard_strings import HARD
from tests.prompt.vocabularies import byte_level, trained_pieces
from workbench.model.formats.texts import open_tokenizer
from workbench.model.hf.convert_gguf import convert_to_gguf
from workbench.oracle import naive
from workbench.testing.family_checkpoints import random_checkpoint

pytestmark = NEEDS_TRANSFORMERS
MARKED = ["<|begin|>a<|end|>", "x<own>y  z", "a<s>b </s>", "<ctrl> <|mark|>x"]
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
# Families whose activation is a table of half precision in ggml, and a rotary scaling whose bounds it rounds to whole
# columns (gpt_oss has truncate: false).
ROUNDED = {"gemma", "gemma2", "gemma3_text", "phi", "gpt2", "starcoder2", "gpt_neox", "falcon", "gpt_oss"}
GEMMA2 = {**WIDE, **GGUF_CASES["gemma2"][0], "head_dim": 64, "query_pre_attn_scalar": 64}
UNWRITTEN = {("phi3", 2), ("falcon", 1)}  # tests/model/formats/test_gguf_write.py has what is refused


def write_byte_level(folder: Path, pre: str) -> None:
    (folder / "tokenizer.json").write_text(byte_level(pre).to_json())


def write_pieces(folder: Path, kind: str) -> None:
    (folder / "tokenizer.model").write_bytes(trained_pieces(kind))


def model_of(family: str, folder: Path, **changes: Any) -> Any:
    """Write a random model of 512 ids with a chat template."""
    theirs = random_checkpoint(family, {"vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2, **changes})
    theirs.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return theirs


@pytest.mark.parametrize(
    ("family", "write", "kind", "changes"),
    [
        ("llama", write_byte_level, "llama-bpe", WIDE), ("qwen2", write_byte_level, "qwen2", WIDE),
        ("mistral", write_pieces, "bpe as Llama", {**WIDE, "sliding_window": None}),
        ("gemma2", write_pieces, "bpe without a dummy prefix", GEMMA2),
    ],
)  # fmt: skip
def test_the_same_ids_and_logits(tmp_path: Path, family: str, write: Any, kind: str, changes: dict[str, Any]) -> None:
    """In each type of matrices; those of blocks are multiplied there by activations of eight bits, an error of up to
    1/254 of a block's largest number at each product."""
    folder = tmp_path / "hf"
    model_of(family, folder, **changes)
    write(folder, kind)
    tokenizer = open_tokenizer(folder)
    assert tokenizer is not None
    ids = draw_ids(20, seed=1)
    for weights, bound in (("f16", 1e-3), ("q8_0", 0.03), ("q4_0", 0.03)):
        path = tmp_path / f"{weights}.gguf"
        assert "vocabulary of llama.cpp" in convert_to_gguf(folder, path, weights, torch.float32)["tokenizer"]
        theirs = torch.tensor(ask(path, ids=ids.tolist())["logits"])
        ours = naive.logits(read_model(path), ids)
        assert (theirs - ours).norm() < bound * ours.norm(), weights
    pairs = random.Random(0).sample([one + other for one in HARD for other in HARD], 300)
    texts = [*HARD, *MARKED, *pairs]
    found = ask(tmp_path / "f16.gguf", texts=texts)
    for text, plain, special in zip(texts, found["plain"], found["special"], strict=True):
        if kind == "qwen2" and not unicodedata.is_normalized("NFC", text):
            continue  # llama.cpp composes no characters
        assert tokenizer.encode(text) == plain, text
        assert tokenizer.encode(text, special=True) == special, text
    assert found["begin"][1] == bool(tokenizer.bos_token_ids) and found["end"] == 2
    assert found["template"] == TEMPLATE
    for id in range(tokenizer.vocab_size):
        assert bytes.fromhex(found["pieces"][id]) == tokenizer.token_bytes(id), id


@pytest.mark.parametrize("family", GGUF_CASES)
def test_logits_of_each_family(tmp_path: Path, family: str) -> None:
    """They are transformers', unless the conversion says what llama.cpp does otherwise."""
    for number, changes in enumerate(GGUF_CASES[family]):
        if (family, number) in UNWRITTEN:
            continue
        path, ids = tmp_path / f"{number}.gguf", draw_ids(24, seed=1)
        model = random_checkpoint(family, changes)
        model.save_pretrained(tmp_path / f"{number}")
        said = convert_to_gguf(tmp_path / f"{number}", path, "f32", torch.float32)
        right, equal = logits_of(model, ids), True
        try:
            found = torch.tensor(ask(path, ids=ids.tolist())["logits"])
            bound = 5e-3 if family in ROUNDED else 1e-5
            equal = bool((found - right).abs().max() < bound * right.abs().max())
        except RuntimeError as error:
            assert "Failed to load model" in str(error)
            equal = False
        assert equal == (not said["llama.cpp"]), (number, changes)


def test_a_tokenizer_that_llama_cpp_has_no_keys_for(tmp_path: Path) -> None:
    """The file is read there for ids and logits."""
    folder, ids = tmp_path / "hf", draw_ids(8, seed=1)
    theirs = model_of("llama", folder)
    write_byte_level(folder, "gpt-2")
    state = json.loads((folder / "tokenizer.json").read_text())
    state["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    said = convert_to_gguf(folder, tmp_path / "a.gguf", "f32", torch.float32)["tokenizer"]
    assert said.startswith("tokenizer.json, which llama.cpp does not read: GGUF has no name for the pattern")
    right = logits_of(theirs, ids)
    found = torch.tensor(ask(tmp_path / "a.gguf", ids=ids.tolist())["logits"])
    assert (found - right).abs().max() < 1e-5 * right.abs().max()
