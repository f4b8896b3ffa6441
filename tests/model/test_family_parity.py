"""Families against transformers, on random weights in float32: the oracle, a prefill in pages, and decode from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compiled_kernels import Backend, backend_problems
from tests.engine.steps import forced
from tests.model.families_of_transformers import CASES, Case, logits_of, saved, token_ids
from workbench.engine import naive
from workbench.executors.base import build_executor
from workbench.executors.capabilities import Requirements
from workbench.executors.select import Backends
from workbench.model.hf.families import read_spec
from workbench.model.hf.weights import load_weights
from workbench.model.transformer import Transformer

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'transformers>=5'")
BOUND = 2e-5
names = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def ours(folder: Path, backend: Backend = Backend.EAGER) -> Transformer:
    spec = read_spec(folder)
    return Transformer.from_state(spec, load_weights(folder, spec, torch.float32), backend)


def assert_equal(given: Tensor, expected: Tensor) -> None:
    assert given.shape == expected.shape
    assert (given - expected).abs().max().item() <= BOUND


@names
def test_logits_equal_transformers(tmp_path: Path, case: Case) -> None:
    theirs = saved(case, tmp_path)
    ids = token_ids(theirs.config.vocab_size)
    expected, model = logits_of(theirs, ids), ours(tmp_path)
    assert_equal(naive.logits(model, ids), expected)
    assert_equal(model.logits(ids), expected)
    assert_equal(forced(model, ids, chunks=(11, 6)), expected[[10, *range(16, len(ids))]])


COMPILED = [
    (Backend.MLIR, "mistral", 1),
    (Backend.MLIR, "gemma2", 2),
    (Backend.MLIR, "deepseek with yarn", 1),
    (Backend.INDUCTOR, "gpt-oss", 1),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("backend", "name", "layers"), COMPILED)
def test_lanes_decode_them(tmp_path: Path, backend: Backend, name: str, layers: int) -> None:
    if problem := backend_problems()[backend]:
        pytest.skip(f"backend {backend}: {problem}")
    (case,) = [case for case in CASES if case.name == name]
    theirs = saved(replace(case, changes={**case.changes, "num_hidden_layers": layers}), tmp_path)
    ids = token_ids(theirs.config.vocab_size, 20)
    expected, model = logits_of(theirs, ids), ours(tmp_path, backend)

    def executor(model, store):
        return build_executor(
            model, store, Backends.uniform(backend, "asked for", Requirements.from_model(model, store))
        )

    rows = forced(model, ids, chunks=(11, 6), executor=executor)
    assert_equal(rows, expected[[10, *range(16, len(ids))]])
