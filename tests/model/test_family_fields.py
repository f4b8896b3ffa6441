"""Fields of config.json, present and absent, family by family: defaults, windows by layer, rotaries, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.families_of_transformers import CASES, Case
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.model.attention_spec import AttentionSpec, MLASpec, RotaryConfig, RotaryScaling
from workbench.model.hf.families import FAMILIES, config_from_spec, read_spec, spec_from_config
from workbench.model.rotary import rotary_frequencies
from workbench.model.spec import ActivationSpec, ModelSpec, MoESpec

COMMON = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


def read(family: str, **changes: object) -> ModelSpec:
    config = {"model_type": family, **COMMON, **changes}
    return spec_from_config({key: value for key, value in config.items() if value is not ...}, "some", "config.json")


def attention_of(spec: ModelSpec, layer: int = 0) -> AttentionSpec:
    attention = spec.layers[layer].attention
    assert isinstance(attention, AttentionSpec)
    return attention


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.sliding_window for layer in spec.layers]


def test_mistral() -> None:
    assert windows(read("mistral")) == [4096] * 6
    assert windows(read("mistral", sliding_window=None)) == [None] * 6
    assert windows(read("mistral", sliding_window=512)) == [512] * 6


def test_qwen3() -> None:
    spec = read("qwen3")
    assert attention_of(spec).qk_norm and attention_of(spec).head_dim == 128 and windows(spec) == [None] * 6
    spec = read("qwen3", use_sliding_window=True, sliding_window=9, max_window_layers=4)
    assert windows(spec) == [None] * 4 + [9] * 2


def test_gemma2() -> None:
    spec = read("gemma2", sliding_window=9)
    first = spec.layers[0]
    assert (
        windows(spec) == [9, None] * 3
        and first.norms == "both"
        and first.activation == ActivationSpec(kind="gelu_tanh")
    )
    assert (attention_of(spec).softcap, spec.final_logit_softcapping, attention_of(spec).scale) == (50.0, 30.0, 1 / 16)
    assert (spec.norm.offset, spec.embedding_scale, spec.tie_word_embeddings, attention_of(spec).head_dim) == (
        1.0,
        8.0,
        True,
        256,
    )
    bare = read("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (attention_of(bare).softcap, bare.final_logit_softcapping) == (0.0, 0.0)


def test_gemma3_has_two_rotaries() -> None:
    old = read("gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"type": "linear", "factor": 8})
    new = read("gemma3_text", rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    })  # fmt: skip
    assert old == new and old.rotary == RotaryConfig(rope_theta=1e6, scaling=RotaryScaling(kind="linear", factor=8))
    assert [attention_of(new, layer).rotary for layer in (0, 5)] == [RotaryConfig(rope_theta=1e4), None]
    assert windows(new) == [4096] * 5 + [None] and attention_of(new).qk_norm
    assert windows(read("gemma3_text", sliding_window_pattern=3)) == [4096, 4096, None] * 2
    plain = read("gemma3_text")
    assert (plain.rotary.rope_theta, attention_of(plain).rotary) == (1e6, RotaryConfig(rope_theta=1e4))


def test_gpt_oss() -> None:
    spec = read("gpt_oss", num_local_experts=8)
    layer, attention = spec.layers[0], attention_of(spec)
    assert windows(spec) == [128, None] * 3
    assert attention.sink_logits and attention.qkv_bias and attention.o_proj_bias and attention.head_dim == 64
    assert layer.experts == MoESpec(num_experts=8, num_experts_per_tok=4, router_bias=True)
    assert layer.activation == ActivationSpec(kind="clamped")
    yarn = RotaryScaling(
        kind="yarn",
        factor=32,
        truncate=False,
        attention_factor=1.3465735902799727,
        original_max_position_embeddings=4096,
    )
    assert spec.rotary == RotaryConfig(rope_theta=150_000.0, scaling=yarn) and spec.norm.eps == 1e-5


def test_defaults_are_those_of_the_families() -> None:
    assert attention_of(read("glm")).qkv_bias and attention_of(read("glm4")).qkv_bias
    assert read("olmo2").rotary.rope_theta == 10_000.0
    assert attention_of(read("ernie4_5")).head_dim == 128
    sliding = {"use_sliding_window": True, "sliding_window": 9, "moe_intermediate_size": 8, "max_window_layers": 4}
    assert windows(read("qwen2_moe", **sliding)) == [9, None, 9, None, None, None]
    assert windows(read("qwen3_moe", **sliding)) == [9] * 6
    experts = [layer.experts for layer in read("deepseek_v2", num_experts_per_tok=6).layers]
    assert all(each is not None and each.num_experts == 64 for each in experts)
    assert attention_of(read("ernie4_5", head_dim=None)).head_dim == 16
    assert windows(read("ministral")) == [4096] * 6 and windows(read("ministral", sliding_window=None)) == [None] * 6
    assert windows(read("cohere2", sliding_window_pattern=2)) == [4096, None] * 3
    assert windows(read("exaone4", sliding_window_pattern="LG")) == [4096, None] * 3
    assert windows(read("exaone4", sliding_window_pattern="LLLG")) == [4096] * 3 + [None, 4096, None]
    full = ["full_attention"] * 6
    assert windows(read("exaone4", sliding_window_pattern="LLLG", layer_types=full)) == [None] * 6


SIZES = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "eos_token_id", "n_embd", "n_layer", "n_head", "n_positions",
    "d_model", "n_heads", "n_layers", "max_seq_len", "ffn_dim", "num_kv_heads", "moe_intermediate_size",
    "num_experts_per_tok",
)  # fmt: skip


@pytest.mark.parametrize("family", list(FAMILIES))
def test_what_a_config_does_not_say_is_what_transformers_takes(family: str) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'transformers>=5'")
    changes = {"num_experts_per_tok": 6} if family == "deepseek_v2" else {}
    config = transformers.AutoConfig.for_model(family, **changes)
    whole = json.loads(config.to_json_string(use_diff=False)) | {"model_type": family, "architectures": None}
    sizes = {key: whole[key] for key in SIZES if key in whole}
    assert spec_from_config(sizes, "some") == spec_from_config(whole, "some")


PUBLISHED = {
    "rope_type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def test_deepseek_v3() -> None:
    spec = read("deepseek_v3", first_k_dense_replace=6, rope_scaling=PUBLISHED)
    attention = spec.layers[0].attention
    assert isinstance(attention, MLASpec)
    assert (attention.kv_lora_rank, attention.qk_rope_head_dim, attention.q_lora_rank) == (512, 64, 1536)
    # The published model code: scale * mscale * mscale, mscale = 0.1 ln(40) + 1; cosines are as they are.
    assert attention.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert spec.rotary.scaling.attention_factor == 1.0
    plain = read("deepseek_v3", first_k_dense_replace=6, q_lora_rank=None).layers[0].attention
    assert isinstance(plain, MLASpec) and plain.q_lora_rank is None and plain.scale is None


def test_yarn_keeps_quick_pairs_and_divides_slow_ones() -> None:
    rotary = RotaryConfig(
        rope_theta=10_000.0, scaling=RotaryScaling(kind="yarn", factor=40.0, original_max_position_embeddings=4096)
    )
    plain, scaled = rotary_frequencies(RotaryConfig(), 64), rotary_frequencies(rotary, 64)
    ratio = plain / scaled
    assert torch.equal(ratio[:11], torch.ones(11, dtype=torch.float64))  # 32 turns: pair 10.5
    assert torch.allclose(ratio[23:], torch.full((9,), 40.0, dtype=torch.float64))  # 1 turn: pair 22.5
    assert (ratio.diff() >= 0).all() and 1 < ratio[16] < 40


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("mistral", {"architectures": ["LlamaForCausalLM"]}, '["MistralForCausalLM"]'),
        ("mistral", {"layer_types": ["full_attention"] * 6}, "as sliding_window says"),
        ("gemma2", {"layer_types": ["sliding_attention"] * 5}, "layer_types"),
        ("gemma2", {"hidden_activation": "silu"}, '"gelu_pytorch_tanh"'),
        ("gemma2", {"sliding_window": None}, "sliding_window is missing"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"final_logit_softcapping": -1}, "final_logit_softcapping is -1"),
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "rope_parameters: full"),
        ("gpt_oss", {"num_local_experts": 2}, "num_experts_per_tok"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok is 3"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"n_group": 7}, "n_group is 7"),
        ("mixtral", {"num_local_experts": 1}, "num_experts_per_tok"),
        ("phi", {"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
        ("falcon", {"alibi": True}, "alibi"),
        ("opt", {"ffn_dim": 8, "do_layer_norm_before": False}, "do_layer_norm_before"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("deepseek_v3", {"first_k_dense_replace": 6, "qk_rope_head_dim": 3}, "even"),
        ("deepseek_v3", {"first_k_dense_replace": 6, "q_lora_rank": None, "attention_bias": True}, "attention_bias"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 6}, "layer_types"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 6}, "layer_types"),
        ("granite", {"layer_types": ["sliding_attention"] * 6}, "layer_types"),
        ("mixtral", {"layer_types": ["sliding_attention"] * 6}, "layer_types"),
        ("exaone4", {"layer_types": ["sliding_attention"] * 6, "sliding_window": None}, "layer_types"),
        ("qwen2", {"is_causal": False}, "is_causal"),
        ("qwen3_moe", {"moe_intermediate_size": 8, "layer_types": ["sliding_attention"] * 6}, "layer_types"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "mlp_bias": True}, "mlp_bias"),
        ("deepseek_v2", {}, "num_experts_per_tok is missing"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("olmo3", {"rope_theta": 10_000.0}, "rope_theta"),
        ("olmo3", {"rope_local_base_freq": 10_000.0}, "rope_local_base_freq"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}},
                         "rope_scaling": {"type": "linear", "factor": 8}}, "rope_scaling"),
        ("qwen2", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "full_attention"),
        ("mistral", {"rope_parameters": {"rope_theta": 5.0, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ("llama", {"original_max_position_embeddings": 8, "rope_scaling": {
            "type": "yarn", "factor": 2, "original_max_position_embeddings": 16}}, "original_max_position_embeddings"),
        ("phi", {"rope_scaling": {"type": "linear", "factor": 2, "partial_rotary_factor": 2}}, "partial_rotary"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [2]}},
            "longrope has factors",
        ),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2}}, "short_factor"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2}}, "Phi 3 has no others"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
        ("phimoe", {"tie_word_embeddings": True, "lm_head_bias": True}, "a head of its own has the bias"),
        ("gptj", {"rotary_dim": 8, "tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act"),
        ("ministral3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "original_max_position"),
        ("ministral3", {"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_scaling"),
        ("llama4_text", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers"),
        ("llama4_text", {"layer_types": ["full_attention"]}, "layer_types"),
        ("llama4_text", {"attention_chunk_size": None}, "attention_chunk_size"),
        ("llama4_text", {"moe_layers": ["all"]}, "moe_layers"),
        ("cohere2", {"order_of_interleaved_layers": "global_attn_first"}, "order_of_interleaved_layers"),
        ("cohere", {"rotary_pct": 0.5}, "rotary_pct"),
        ("gptj", {"rotary_dim": None}, "rotary_dim"),
        ("gptj", {"rotary_dim": 8, "rope_theta": 5.0}, "rope_theta"),
        ("gpt_neox", {"rotary_emb_base": 10_000, "rope_theta": 500.0}, "rope_theta"),
        ("gpt_neox", {"rotary_pct": 0.25, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ("starcoder2", {"mlp_type": "gated"}, "mlp_type"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act"),
        ("gemma", {"hidden_activation": "relu"}, "hidden_activation"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 6, "sliding_window": 9}, "layer_types"),
        ("exaone4", {"sliding_window_pattern": "LLX"}, "sliding_window_pattern"),
        ("exaone4", {"sliding_window_pattern": None}, "sliding_window_pattern"),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla"),
        ("ernie4_5", {"compression_ratio": 2.0}, "compression_ratio"),
        ("ministral", {"sliding_window": None, "layer_types": ["sliding_attention"] * 6}, "sliding_window"),
        ("mpt", {"no_bias": False}, "no_bias"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type"),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type"),
        ("mpt", {"attn_config": {"rope": True}}, "rope"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_named_with_its_field(family: str, changes: dict[str, object], said: str) -> None:
    with pytest.raises(WorkbenchError, match="^config.json: .*" + re.escape(said)):
        read(family, **changes)


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_keys = st.sampled_from([
    *COMMON, "head_dim", "hidden_act", "hidden_activation", "rope_scaling", "rope_parameters", "rope_theta",
    "layer_types", "sliding_window", "sliding_window_pattern", "use_sliding_window", "max_window_layers",
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "num_local_experts",
    "num_experts_per_tok", "swiglu_limit", "swiglu_alpha", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim",
    "qk_nope_head_dim", "v_head_dim", "first_k_dense_replace", "rope_interleave", "attention_bias",
])  # fmt: skip


@settings(max_examples=tries(300))
@given(st.sampled_from(list(FAMILIES)), st.dictionaries(_keys, _json, max_size=3))
def test_any_json_is_a_spec_or_a_clear_error(family: str, changes: dict[str, object]) -> None:
    try:
        assert read(family, **changes).layers
    except WorkbenchError as error:
        assert "config.json" in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_transformers_writes_is_read(tmp_path: Path, case: Case) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'transformers>=5'")
    from tests.model.families_of_transformers import LAYERS

    config = getattr(transformers, f"{case.config or case.architecture}Config")(**{**LAYERS, **case.changes})
    config.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    stored: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    assert (spec.hidden_size, len(spec.layers), spec.eos_token_ids) == (64, stored["num_hidden_layers"], (3,))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_what_a_llama_config_cannot_say_is_not_exported(family: str) -> None:
    """A family whose layers are Llama's, but for names and orders in files, is exported and reads back as it is."""
    more = {"opt": {"ffn_dim": 8}, "gptj": {"rotary_dim": 8}, "gemma3n_text": {"num_kv_shared_layers": 0}}.get(
        family, {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
    )
    spec = read(family, **more)
    spec = spec.model_copy(update={"layers": spec.layers[:1]})
    try:
        config = config_from_spec(spec)
    except WorkbenchError as error:
        assert "a Llama config" in str(error)
    else:
        assert family in LIKE_LLAMA and spec_from_config(config, "some") == spec


LIKE_LLAMA = ("qwen2", "phi3", "smollm3", "ernie4_5", "helium", "granite", "seed_oss", "ministral", "glm")
