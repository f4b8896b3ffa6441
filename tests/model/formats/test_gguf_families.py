"""GGUF files of transformers' models: logits equal theirs, and of quantized files those of the dequantized model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_kernels.linear.matrix_format import MatrixFormat
from compiled_kernels.linear.quantize import dequantize_matrix
from tests.model.families import (
    GGUF_CASES,
    LLAMA3,
    NEEDS_TRANSFORMERS,
    WIDE,
    assert_equal,
    draw_ids,
    logits_of,
    named,
    read_model,
)
from workbench.errors import WorkbenchError
from workbench.model.formats.gguf.blocks import BLOCK_TYPES
from workbench.model.formats.gguf.families import ARCHITECTURES
from workbench.model.formats.gguf.file import GGUFFile
from workbench.model.formats.open import open_checkpoint, read_config
from workbench.model.hf.families import read_spec
from workbench.model.hf.kept import KeptMatrix, kept_matrices, stored_format
from workbench.model.hf.weights import read_parameter, wanted_parameters
from workbench.model.quantized import WeightFormat
from workbench.oracle import naive
from workbench.testing.family_checkpoints import random_checkpoint

gguf = pytest.importorskip("gguf", reason="the writer of the files: pip install gguf")
pytestmark = NEEDS_TRANSFORMERS
from tests.model.formats import gguf_of_transformers as writing  # noqa: E402

EVERY = [(family, changes) for family, cases in GGUF_CASES.items() for changes in cases]
KINDS = [type.name for type in BLOCK_TYPES.values() if type.name != "F32"]


def test_every_architecture_has_a_case() -> None:
    written = {gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[writing.ARCHITECTURES[family]]] for family in GGUF_CASES}
    assert written == set(ARCHITECTURES)


@named(EVERY)
def test_logits_are_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Longer than every window, in float32."""
    theirs = random_checkpoint(family, changes)
    path = writing.write_gguf(theirs, tmp_path / "model.gguf", tmp_path / "hf", eos=3)
    ids = draw_ids(24, seed=1)
    ours = read_model(path)
    assert_equal(naive.logits(ours, ids), logits_of(theirs, ids))
    assert ours.spec.eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], [3, 4, 5]), (["</s>", "<|im_end|>", "<|im_start|>"], [3, 4]),
        (["<eos>", "<end_of_turn>"], [3, 4]), (["</s>", "<|end|>"], [3, 4]),
        (["<|return|>", "<|call|>", "<|end|>"], [3, 4]),
        (["</s>", "eot_id", "<|user|>"], [3]),
    ],
    ids=str,
)  # fmt: skip
def test_ends_are_found_by_name_where_a_file_has_one_key(tmp_path: Path, names: list[str], ends: list[int]) -> None:
    """An old Llama 3 has <|end_of_text|> alone, and says <|eot_id|> at a turn's end."""
    theirs = random_checkpoint("llama", {})
    entries = [f"t{id}" for id in range(theirs.config.vocab_size)]
    entries[3 : 3 + len(names)] = names
    changed = {"tokenizer.ggml.tokens": entries}
    path = writing.write_gguf(theirs, tmp_path / "model.gguf", tmp_path / "hf", eos=3, changed=changed)
    assert sorted(read_model(path).spec.eos_token_ids) == ends


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_a_quantized_file_is_the_dequantized_model(tmp_path: Path, family: str, kind: str) -> None:
    """Bit for bit the logits of a float32 file whose numbers are those that the package dequantizes."""
    changes = {**WIDE, "head_dim": 64, "sliding_window": None if family == "mixtral" else 7}
    if family == "mixtral":
        changes |= {"num_local_experts": 3, "num_experts_per_tok": 2}
    if family == "llama":
        del changes["sliding_window"]
    theirs = random_checkpoint(family, changes)
    stored = writing.write_gguf(theirs, tmp_path / "a.gguf", tmp_path / "hf", kind)
    widened = writing.write_gguf(theirs, tmp_path / "b.gguf", tmp_path / "hf", kind, widened=True)
    ids = draw_ids(12, seed=1)
    expected = naive.logits(read_model(widened), ids)
    assert torch.isfinite(expected).all()
    assert torch.equal(naive.logits(read_model(stored), ids), expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_integers_in_groups_are_ours_bit_for_bit(tmp_path: Path, kind: str) -> None:
    path = writing.write_gguf(random_checkpoint("llama", WIDE), tmp_path / "a.gguf", tmp_path / "hf", kind)
    checkpoint = open_checkpoint(path)
    for name, tensor in checkpoint.tensors.items():
        quantized = tensor.quantized()
        assert (quantized is not None) == (len(tensor.shape) == 2), name
        if quantized is not None:
            assert torch.equal(quantized.dequantize(), tensor.read()) and (quantized.minima is None) == (kind != "Q4_1")
    assert checkpoint.format == f"GGUF {kind}"
    wanted = wanted_parameters(checkpoint, read_spec(path))
    words, reasons = stored_format(checkpoint, wanted, tied=False)
    int4 = MatrixFormat("int4", 32, torch.float16, torch.float16 if kind == "Q4_1" else None)
    own = MatrixFormat.named("q8_0") if kind == "Q8_0" else int4
    assert own == words.blocks == words.head == words.embedding
    assert not words.own and not reasons
    groups, _ = stored_format(checkpoint, wanted, False, lambda format: "no words" if format.words else None)
    assert groups.blocks.codes == ("int8" if kind == "Q8_0" else "int4")
    finer = WeightFormat(*[replace(groups.blocks, group=16)] * 2)  # a scale for 32 columns is two for 16
    for format in (words, groups, finer):
        held = kept_matrices(checkpoint, wanted, False, format)
        assert {"head.weight", "blocks.0.attention.qkv.weight", "blocks.0.feedforward.down.weight"} <= held.keys()
        for name, kept in held.items():
            assert kept.rows == format.rows_of(name, wanted[name].shape)
            dense = read_parameter(checkpoint, wanted[name], torch.float32)
            assert isinstance(kept, KeptMatrix)
            (run,) = kept.runs
            assert torch.equal(dequantize_matrix(run.format, *run.tensors()), dense), name


def test_the_parts_of_a_split_file(tmp_path: Path) -> None:
    """The parts are one model; a missing one and another than the first are refused."""
    theirs = random_checkpoint("qwen2", {})
    whole = writing.write_gguf(theirs, tmp_path / "whole.gguf", tmp_path / "hf")
    writing.write_gguf(theirs, tmp_path / "m.gguf", tmp_path / "hf", tensors_per_file=9)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 2 and parts[0].name.startswith("m-00001-of-")
    ids = draw_ids(12, seed=1)
    assert torch.equal(naive.logits(read_model(parts[0]), ids), naive.logits(read_model(whole), ids))
    with pytest.raises(WorkbenchError, match="name the first of them"):
        read_spec(parts[1])
    parts[1].unlink()
    with pytest.raises(WorkbenchError, match="1 of its .* parts are missing: m-00002"):
        read_spec(parts[0])


def test_rotary_factors_are_read_from_the_part_that_holds_them(tmp_path: Path) -> None:
    """The factors are written last: in the last part."""
    theirs = random_checkpoint("llama", {"rope_parameters": LLAMA3, "head_dim": 64})
    whole = writing.write_gguf(theirs, tmp_path / "whole.gguf", tmp_path / "hf")
    writing.write_gguf(theirs, tmp_path / "m.gguf", tmp_path / "hf", tensors_per_file=9)
    first, *_, last = sorted(tmp_path.glob("m-*.gguf"))
    assert "rope_freqs.weight" in GGUFFile(last).tensors and "rope_freqs.weight" not in GGUFFile(first).tensors
    assert read_spec(first).rotary == read_spec(whole).rotary
    assert read_spec(first).rotary.scaling.kind == "llama3"


REFUSED = [
    ("general.architecture", "lama", "did you mean 'llama'"),
    ("general.type", "adapter", "holds a adapter, not a model"),
    ("llama.attention.temperature_scale", 0.5, "llama.attention.temperature_scale is 0.5"),
    ("llama.rope.scaling.type", "dynamic", 'llama.rope.scaling.type is "dynamic"'),
    ("llama.rope.dimension_count", 8, "partial_rotary_factor is 0.5"),
    ("llama.attention.value_length", 8, r"attention.key_length \(16\)"),
    ("llama.vocab_size", 7, r"the rows of token_embd.weight \(131\)"),
    ("llama.block_count", 5, "lacks blk.4.attn_norm.weight"),
    ("llama.block_count", 3, "has extra blk.3."),
    ("llama.embedding_length", 32, "token_embd.weight has shape"),
    ("llama.attention.head_count", [4, 4, 2, 4], "attention.head_count is"),
    ("llama.feed_forward_length", "wide", 'feed_forward_length is "wide"'),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED)
def test_what_is_not_carried_out_is_refused_by_name(tmp_path: Path, key: str, value: Any, message: str) -> None:
    theirs = random_checkpoint("llama", {})
    path = writing.write_gguf(theirs, tmp_path / "a.gguf", tmp_path / "hf", changed={key: value})
    with pytest.raises(WorkbenchError, match=message):
        read_model(path)


def test_rotary_factors_that_are_not_llama3s_are_refused(tmp_path: Path) -> None:
    theirs = random_checkpoint("llama", {"rope_parameters": {**LLAMA3, "high_freq_factor": 6.0}, "head_dim": 64})
    path = writing.write_gguf(theirs, tmp_path / "a.gguf", tmp_path / "hf")
    with pytest.raises(WorkbenchError, match="rope_freqs.weight is"):
        read_spec(path)


def test_an_array_of_equal_values_is_one_value(tmp_path: Path) -> None:
    theirs = random_checkpoint("llama", {})
    changed = {"llama.attention.head_count_kv": [2] * 4, "llama.feed_forward_length": [48] * 4}
    ids = draw_ids(12, seed=1)
    path = writing.write_gguf(theirs, tmp_path / "a.gguf", tmp_path / "hf", changed=changed)
    assert_equal(naive.logits(read_model(path), ids), logits_of(theirs, ids))


def test_the_dtype_of_most_numbers_is_computed_in(tmp_path: Path) -> None:
    theirs = random_checkpoint("llama", WIDE)
    for kind, dtype in (("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q4_0", "bfloat16")):
        path = writing.write_gguf(theirs, tmp_path / f"{kind}.gguf", tmp_path / "hf", kind)
        assert read_config(path).get("torch_dtype") == dtype
