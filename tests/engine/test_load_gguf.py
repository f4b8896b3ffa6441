"""`workbench.load("model.gguf")`: the file alone is a model with its tokenizer, kept in the bits that a product has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench
from compiled_kernels import Backend
from compiled_kernels.linear.matrix_format import MatrixFormat
from tests.model.families import WIDE
from tests.prompt.vocabularies import gguf_byte_level
from workbench.engine import loaded_model
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.executors.capabilities import Role
from workbench.executors.requirements import Refusal, Requirements
from workbench.memory.report import read_spec_and_remarks
from workbench.model.formats.gguf.blocks import INT4_TYPES
from workbench.model.formats.open import open_checkpoint
from workbench.model.hf.convert_gguf import convert_to_gguf
from workbench.testing.family_checkpoints import random_checkpoint

pytest.importorskip("gguf", reason="the writer of the files: pip install gguf")
from tests.model.formats import gguf_of_transformers as writing  # noqa: E402

PROMPT = "def fibonacci(n):"
VOCABULARY = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in gguf_byte_level("gpt-2").items()}


@pytest.fixture(scope="module")
def model() -> Any:
    return random_checkpoint("llama", {**WIDE, "vocab_size": len(VOCABULARY["tokenizer.ggml.tokens"])})


def written(model: Any, folder: Path, kind: str) -> Path:
    return writing.write_gguf(model, folder / "model.gguf", folder / "hf", kind, changed=VOCABULARY)


def text_of(path: Path, report: Any = [].append, backend: str = "eager", **settings: Any) -> str:
    runner = workbench.load(str(path), backend=backend, report=report, **settings)
    return "".join(event.text for event in runner.stream(PROMPT, max_tokens=8, temperature=0))


OTHER_NAMES = {"F16": MatrixFormat("float16"), **INT4_TYPES}


@pytest.mark.parametrize(("kind", "backend"), [
    ("Q4_0", "eager"), ("Q4_1", "eager"), ("Q5_0", "eager"), ("Q8_0", "mlir"), ("Q4_K", "mlir"), ("Q6_K", "eager"),
    ("F16", "mlir"),
])  # fmt: skip
def test_integers_stay_and_give_the_tokens_of_their_numbers(
    tmp_path: Path, model: Any, kind: str, backend: str
) -> None:
    """Widened to float32 the same file has the same greedy tokens; an embedding apart from the head stays too."""
    path, lines = written(model, tmp_path, kind), []
    runner = workbench.load(str(path), backend="eager", dtype="float32", report=lines.append)
    built: Any = runner.model
    right = OTHER_NAMES.get(kind) or MatrixFormat.named(kind.lower())
    assert built.blocks[0].attention.qkv.format == built.embedding.format == right
    assert text_of(path, lines.append, backend, dtype="float32") == text_of(path, dtype="float32", weights="dense")
    assert not lines


@pytest.mark.parametrize(("kind", "kept"), [("Q4_K", None), ("Q8_0", MatrixFormat("int8", 32, torch.float16))])
def test_what_a_backend_refuses_is_widened_with_a_line(
    tmp_path: Path, model: Any, kind: str, kept: MatrixFormat | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line says which, why, and what it costs; Q8_0 is then kept in groups of columns with a scale."""

    def refuse(backend: Backend, wanted: Requirements, role: Role) -> Refusal | None:
        return Refusal("cannot", f"none for {wanted.weights}") if wanted.weights.blocks.words else None

    lines: list[str] = []
    monkeypatch.setattr(loaded_model, "unsupported", refuse)
    text_of(written(model, tmp_path, kind), lines.append)
    cost = rf"GGUF {kind}, 15 of 16 quantized tensors are widened to bfloat16, 1.98 MiB for \d+ KiB in the files "
    named = r"\(blk.0.attn_q.weight and 14 more: backend eager: none for q4_k\)$"
    assert len(lines) == (kept is None) and all(re.search(cost + named, line) for line in lines)


def test_a_folder_with_one_file_and_the_memory_report(tmp_path: Path, model: Any) -> None:
    path = written(model, tmp_path, "F32")
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / path.name).write_bytes(path.read_bytes())
    assert text_of(tmp_path / "alone") == text_of(path)
    found, right = (read_spec_and_remarks(str(each))[0] for each in (tmp_path / "alone", path))
    assert found.layers == right.layers


def test_the_demo_as_gguf_says_what_the_demo_says(tmp_path: Path) -> None:
    """float32 of bfloat16 weights is exact, and the tokenizer goes with it."""

    convert_to_gguf(BUNDLED_MODELS["demo"], tmp_path / "demo.gguf", "bf16", torch.bfloat16)
    assert open_checkpoint(tmp_path / "demo.gguf").format == "GGUF BF16"
    assert text_of(tmp_path / "demo.gguf", dtype="float32") == text_of(Path("demo"), dtype="float32") != ""
