"""GGUF files of transformers' models: logits equal theirs, and of quantized files those of the dequantized model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_kernels.linear.quantize import dequantize_matrix
from tests.model.test_every_family import assert_equal, draw_ids, logits_of
from workbench.engine import naive
from workbench.errors import WorkbenchError
from workbench.model.formats.gguf.families import ARCHITECTURES
from workbench.model.formats.gguf.file import GGUFFile
from workbench.model.formats.open import open_checkpoint, read_config
from workbench.model.hf.families import read_spec
from workbench.model.hf.kept import KeptMatrix, kept_matrices, stored_format
from workbench.model.hf.weights import load_weights, read_parameter, wanted_parameters
from workbench.model.transformer import Transformer
from workbench.testing.family_checkpoints import random_checkpoint

gguf = pytest.importorskip("gguf", reason="the writer of the files: pip install gguf")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'transformers>=5'")
from tests.model.formats import gguf_of_transformers as writing  # noqa: E402

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500_000.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 1.0,
    "rope_theta": 1000.0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1000.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)], "long_factor": [2.0 + 0.5 * pair for pair in range(8)],
}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 2.0, "attention_multiplier": 0.2,
}  # fmt: skip
GEMMA = {"head_dim": 24, "sliding_window": 7, "query_pre_attn_scalar": 24}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": (
        {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
        {"rope_parameters": LLAMA3, "head_dim": 32},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}},
        {"rope_parameters": YARN},
    ),
    "mistral": ({"sliding_window": None, "head_dim": 24, "rope_theta": 1e6},),
    "mixtral": ({"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},),
    "qwen2": ({}, {"tie_word_embeddings": True}),
    "qwen2_moe": ({**QWEN_EXPERTS, "shared_expert_intermediate_size": 64, "norm_topk_prob": False},),
    "qwen3": ({"head_dim": 24},),
    "qwen3_moe": ({**QWEN_EXPERTS, "norm_topk_prob": True},),
    "gemma": ({"head_dim": 24},),
    "gemma2": ({**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},),
    "gemma3_text": (
        {**GEMMA, "num_hidden_layers": 7, "final_logit_softcapping": 10.0, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}},
    ),
    "phi": ({"intermediate_size": 256}, {"intermediate_size": 256, "partial_rotary_factor": 0.25}),
    "phi3": (
        {"sliding_window": 7}, {"sliding_window": None, "partial_rotary_factor": 0.5},
        {"sliding_window": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    ),
    "gpt2": ({"n_inner": 256},),
    "starcoder2": ({"sliding_window": None},),
    "gpt_neox": ({"rotary_pct": 0.25}, {"rotary_pct": 0.5, "use_parallel_residual": False}),
    "falcon": (
        {"multi_query": True}, {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "stablelm": (
        {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
        {"partial_rotary_factor": 0.5, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "nemotron": ({},),
    "olmo": ({"clip_qkv": 0.8}, {}),
    "olmo2": ({}, {"num_key_value_heads": 4}),
    "olmo3": ({"sliding_window": 7},),
    "olmoe": ({"num_experts": 6, "num_experts_per_tok": 2},),
    "granite": (MULTIPLIERS,),
    "granitemoe": ({**MULTIPLIERS, "num_local_experts": 6, "num_experts_per_tok": 2},),
    "smollm3": ({"num_hidden_layers": 5},),
    "arcee": ({},),
    "cohere": ({}, {"use_qk_norm": True}),
    "cohere2": ({"sliding_window": 7, "num_hidden_layers": 5},),
    "exaone4": ({"sliding_window": 7, "sliding_window_pattern": 4},),
    "glm4": ({"head_dim": 16, "attention_bias": True},),
    "ernie4_5": ({"head_dim": 16},),
    "seed_oss": ({"head_dim": 16},),
    "hunyuan_v1_dense": ({"head_dim": 16},),
    "gpt_oss": ({"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7},),
}  # fmt: skip
EVERY = [(family, changes) for family, cases in CASES.items() for changes in cases]


def ours_of(path: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    spec = read_spec(path)
    return Transformer.from_state(spec, load_weights(path, spec, dtype))


def test_every_architecture_has_a_case() -> None:
    written = {gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[writing.ARCHITECTURES[family]]] for family in CASES}
    assert written == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("family", "changes"), EVERY, ids=[f"{family}-{index}" for index, (family, _) in enumerate(EVERY)]
)
def test_logits_are_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Longer than every window, in float32."""
    theirs = random_checkpoint(family, changes)
    path = writing.write_gguf(theirs, tmp_path / "model.gguf", tmp_path / "hf", eos=3)
    ids = draw_ids(24, seed=1)
    ours = ours_of(path)
    assert_equal(naive.logits(ours, ids), logits_of(theirs, ids))
    assert ours.spec.eos_token_ids == (3,)


WIDE = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 2,
}  # fmt: skip
KINDS = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]


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
    expected = naive.logits(ours_of(widened), ids)
    assert torch.isfinite(expected).all()
    assert torch.equal(naive.logits(ours_of(stored), ids), expected)


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
    format, reason = stored_format(checkpoint, wanted, tied=False)
    assert format.blocks.codes == ("int8" if kind == "Q8_0" else "int4")
    assert reason == "token_embd.weight is no matrix of a product"
    for name, kept in kept_matrices(checkpoint, wanted, False, format).items():
        dense = read_parameter(checkpoint, wanted[name], torch.float32)
        assert isinstance(kept, KeptMatrix)
        assert torch.equal(dequantize_matrix(kept.format, *kept.tensors()), dense), name


def test_the_parts_of_a_split_file(tmp_path: Path) -> None:
    """The parts are one model; a missing one and another than the first are refused."""
    theirs = random_checkpoint("qwen2", {})
    whole = writing.write_gguf(theirs, tmp_path / "whole.gguf", tmp_path / "hf")
    writing.write_gguf(theirs, tmp_path / "m.gguf", tmp_path / "hf", tensors_per_file=9)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 2 and parts[0].name.startswith("m-00001-of-")
    ids = draw_ids(12, seed=1)
    assert torch.equal(naive.logits(ours_of(parts[0]), ids), naive.logits(ours_of(whole), ids))
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


REFUSED: dict[str, tuple[str, Any, str]] = {
    "another architecture": ("general.architecture", "lama", "did you mean 'llama'"),
    "an adapter": ("general.type", "adapter", "holds a adapter, not a model"),
    "a key that changes the model": (
        "llama.attention.temperature_scale",
        0.5,
        "llama.attention.temperature_scale is 0.5",
    ),
    "a rotary scaling": ("llama.rope.scaling.type", "dynamic", 'llama.rope.scaling.type is "dynamic"'),
    "part of a head rotated": ("llama.rope.dimension_count", 8, "partial_rotary_factor is 0.5"),
    "values of another width": ("llama.attention.value_length", 8, r"attention.key_length \(16\)"),
    "another vocabulary": ("llama.vocab_size", 7, r"the rows of token_embd.weight \(131\)"),
    "layers": ("llama.block_count", 5, "lacks blk.4.attn_norm.weight"),
    "fewer layers": ("llama.block_count", 3, "has extra blk.3."),
    "a width": ("llama.embedding_length", 32, "token_embd.weight has shape"),
    "an array that differs": ("llama.attention.head_count", [4, 4, 2, 4], "attention.head_count is"),
    "no number": ("llama.feed_forward_length", "wide", 'feed_forward_length is "wide"'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_carried_out_is_refused_by_name(tmp_path: Path, name: str) -> None:
    key, value, message = REFUSED[name]
    theirs = random_checkpoint("llama", {})
    path = writing.write_gguf(theirs, tmp_path / "a.gguf", tmp_path / "hf", changed={key: value})
    with pytest.raises(WorkbenchError, match=message):
        ours_of(path)


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
    assert_equal(naive.logits(ours_of(path), ids), logits_of(theirs, ids))


def test_the_dtype_of_most_numbers_is_computed_in(tmp_path: Path) -> None:
    theirs = random_checkpoint("llama", WIDE)
    for kind, dtype in (("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q4_0", "bfloat16")):
        path = writing.write_gguf(theirs, tmp_path / f"{kind}.gguf", tmp_path / "hf", kind)
        assert read_config(path).get("torch_dtype") == dtype
