"""The recipe of the demo models: what it learns with, that it resumes exactly, and that its files are the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench
from experiments.demo_tokenizer import bytes_only
from tests.thorough import tries
from tools.training import demo_model, train_demo
from tools.training.demo_corpus import held_out_files, training_files
from tools.training.muon import orthogonalize
from tools.training.train_demo import Corpus, Recipe, export, train

TINY = {
    **demo_model.COMMON, "vocab_size": 300, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 40, "max_position_embeddings": 32,
}  # fmt: skip
RECIPE = Recipe("tiny", tokens=3_200, sequences=2, warm_up=5)


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """Bytes of a few small modules."""
    monkeypatch.setitem(demo_model.SHAPES, "tiny", TINY)
    monkeypatch.setattr(train_demo, "CONTEXT", 32)
    tokenizer, made = bytes_only(), Corpus.__new__(Corpus)
    small = [file for file in training_files() if 500 < file.path.stat().st_size < 3_000][:12]
    made.training, made.held_out = (
        [np.array([0, *tokenizer.encode(file.text()).ids, 1], np.uint16) for file in files]
        for files in (small[:10], small[10:])
    )
    return made


@settings(max_examples=tries(20))
@given(st.integers(0, 99), st.integers(2, 24), st.integers(2, 24))
def test_orthogonalized_matrices_are_nearly_orthogonal(seed: int, rows: int, columns: int) -> None:
    matrix = torch.randn(1, rows, columns, generator=torch.Generator().manual_seed(seed))
    values = torch.linalg.svdvals(orthogonalize(matrix).float()[0])
    assert values.max() < 1.35
    assert values.median() > 0.5


def test_the_rate_rises_stays_and_falls_to_nothing() -> None:
    recipe = Recipe("target", tokens=8 * 1024 * 1_000, warm_up=100, fall=0.5)
    rates = [recipe.rate(step) for step in range(recipe.steps)]
    assert recipe.steps == 1_000
    assert rates[:100] == sorted(rates[:100]) and rates[100] == rates[499] == 1.0
    assert rates[500:] == sorted(rates[500:], reverse=True) and 0 < rates[-1] <= 0.002


def test_batches_are_the_same_however_far_in_they_begin(corpus: Corpus) -> None:
    whole = [batch for batch, _ in zip(corpus.batches(RECIPE, 0), range(40), strict=False)]
    late = [batch for batch, _ in zip(corpus.batches(RECIPE, 17), range(23), strict=False)]
    assert all(torch.equal(a, b) for a, b in zip(whole[17:], late, strict=True))
    read, wanted = whole[0]
    assert torch.equal(read[:, 1:], wanted[:, :-1])
    assert not torch.equal(whole[0], next(corpus.batches(replace(RECIPE, seed=1), 0)))


def test_an_interrupted_training_ends_where_a_whole_one_does(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_demo, "CHECKPOINT_STEPS", 20)
    folders = [tmp_path / name for name in ("whole", "broken")]
    for folder in folders:
        folder.mkdir()
    whole = train(RECIPE, corpus, folders[0], "cpu", compiled=False)
    batches = Corpus.batches

    def broken(self, recipe, first):
        for step, batch in enumerate(batches(self, recipe, first), first):
            if step == 33 and first == 0:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(Corpus, "batches", broken)
    with pytest.raises(KeyboardInterrupt):
        train(RECIPE, corpus, folders[1], "cpu", compiled=False)
    resumed = train(RECIPE, corpus, folders[1], "cpu", compiled=False)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_the_exported_files_are_the_model_that_learned(corpus: Corpus, tmp_path: Path) -> None:
    model = demo_model.Learner(TINY, seed=3)
    for parameter in model.parameters():  # nothing may hide behind a zero or a one
        parameter.data = (parameter.data + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    export(model, tmp_path, bytes_only())
    ids = torch.arange(2, 30)
    exact = workbench.load(str(tmp_path), dtype="float32", backend="eager").model.logits(ids)
    learned = model(ids[None])[0].detach()
    assert (exact - learned).abs().max() < 0.05 * exact.abs().max()


def test_held_out_files_are_listed_as_paths() -> None:
    listed = train_demo.held_out_files()
    assert listed == [file.path for file in held_out_files()]
    assert not set(listed) & {file.path for file in training_files()}


def test_what_is_interrupted_in_writing_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, cache = held_out_files()[:2], tmp_path / "held_out.npz"
    whole = np.savez

    def half(file, **arrays) -> None:
        whole(file, **arrays)
        file.truncate(50)
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", half)
    with pytest.raises(KeyboardInterrupt):
        train_demo._encoded(bytes_only(), files, cache)
    monkeypatch.setattr(np, "savez", whole)
    first, again = (train_demo._encoded(bytes_only(), files, cache) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True)) and cache.exists()
