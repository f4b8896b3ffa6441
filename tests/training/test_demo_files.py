"""The files of `workbench/demo/` are those that its card describes."""

from __future__ import annotations

import json
import platform

import pytest
import torch

import workbench
from experiments.demo_tokenizer import CONTROL, bytes_only
from tools.training import demo_corpus
from workbench.engine.loaded_model import DEMO_FOLDER
from workbench.prompt.tokenization.tokenizer import Tokenizer

CARD = json.loads((DEMO_FOLDER / "card.json").read_text())


@pytest.mark.parametrize(("name", "most"), [("target", 8_000_000), ("draft", 999_999)])
def test_shapes_and_sizes(name: str, most: int) -> None:
    spec = workbench.load(str(DEMO_FOLDER / name), backend="eager").model.spec
    assert spec.num_parameters <= most
    assert spec.vocab_size == 4096 and spec.max_position_embeddings == 1024 and spec.tie_word_embeddings
    attention = spec.layers[0].attention
    assert attention.num_kv_heads < attention.num_heads and attention.head_dim & (attention.head_dim - 1) == 0
    assert (DEMO_FOLDER / name / "model.safetensors").stat().st_size <= 16_000_000


def test_both_models_read_with_one_tokenizer() -> None:
    files = [(DEMO_FOLDER / name / "tokenizer.json").read_bytes() for name in ("target", "draft")]
    assert files[0] == files[1]
    tokenizer = Tokenizer.from_file(DEMO_FOLDER / "target" / "tokenizer.json")
    assert tokenizer.vocab_size == 4096
    assert sorted(tokenizer.special_token_ids) == sorted(CONTROL)


def test_the_tokenizer_without_merges_ships() -> None:
    shipped = Tokenizer.from_file(DEMO_FOLDER / "bytes" / "tokenizer.json")
    text = "def f(x):\n    return 'ä€𝄞'\n"
    assert shipped.encode(text) == bytes_only().encode(text).ids
    assert len(shipped.encode(text)) == len(text.encode()) and shipped.decode(shipped.encode(text)) == text


def test_the_card_tells_the_figures_that_were_measured() -> None:
    figures = CARD["bits_per_byte"]
    text = (DEMO_FOLDER / "README.md").read_text()
    assert all(f"| {name} | {value:.4f} |" in text for name, value in figures.items())
    assert figures["target"] < figures["xz -9e"]


def test_every_file_of_the_corpus_is_recorded() -> None:
    recorded = json.loads((DEMO_FOLDER / "corpus.json").read_text())
    sides = {file["name"]: file["side"] for file in recorded["files"]}
    assert set(sides.values()) == {"training", "held_out"} and all(len(f["sha256"]) == 64 for f in recorded["files"])
    for file in demo_corpus.source_files():
        if file.name in sides:  # another Python has other files, but never the same file on the other side
            assert sides[file.name] == ("held_out" if file.held_out else "training")
    if recorded["python"] == platform.python_version():
        here = {file.name: file.sha256() for file in demo_corpus.held_out_files()}
        kept = {f["name"]: f["sha256"] for f in recorded["files"] if f["side"] == "held_out"}
        assert here.keys() & kept.keys() and all(kept[name] == here[name] for name in here.keys() & kept.keys())


def test_held_out_code_is_predicted_better_than_chance_by_far() -> None:
    """Not the card's figure (that takes minutes): one held-out file's first window, well under its entropy."""
    runner = workbench.load("demo", dtype="float32", backend="eager")
    assert runner.tokenizer is not None
    text = next(f for f in demo_corpus.held_out_files() if f.path.stat().st_size > 8_000).text()
    ids = torch.tensor(runner.tokenizer.encode(text)[:400])
    nats = torch.nn.functional.cross_entropy(runner.model.logits(ids)[:-1], ids[1:]).item()
    assert nats < 4.0  # chance is 8.3
