"""Every refusal of the room is one line that names the place, what is wrong there, and what would be right."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_kernels.linear.matrix_format import DENSE_MATRIX
from tests.calls import refusal_of
from tests.engine.tiny import in_eights, layer, spec_of, weights_of
from tests.model.families import Changes, spec_of_config
from workbench.memory.report import report_for
from workbench.model.attention_config import AttentionConfig
from workbench.model.attention_spec import AttentionSpec
from workbench.model.hf.any_config import spec_from_any_config
from workbench.model.quantized import WeightFormat
from workbench.model.shapes import named_shape
from workbench.model.spec import LayerSpec, ModelSpec
from workbench.model.variants import change_attention, change_spec
from workbench.units import parse_bytes

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SIX_HEADS = LayerSpec(attention=AttentionSpec(num_heads=6, num_kv_heads=6, head_dim=4), intermediate_size=8)
SIX = ModelSpec(name="six", vocab_size=11, hidden_size=24, layers=(SIX_HEADS,) * 6, max_position_embeddings=64)
IDLE_SINKS = {"sliding_window": "full", "num_sink_tokens": 2}


def refused(call: Any, *arguments: Any, **named: Any) -> str:
    message, _ = refusal_of(lambda: call(*arguments, **named))
    assert "\n" not in message
    return message


CONFIGS: list[tuple[str, Changes, str]] = [
    ("llama", {"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: llama, mistral"),
    ("llama", {"model_type": ...}, "model_type is missing"),
    ("llama", {"vocab_size": ...}, "vocab_size is missing; it must be an integer of at least 1"),
    ("llama", {"hidden_size": "64"}, 'hidden_size is "64"; it must be an integer'),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be an integer of at least 1"),
    ("llama", {"num_hidden_layers": 10**12}, "it must be an integer of at most 10000"),
    ("llama", {"rope_theta": 10**400}, "it must be a finite number above 0"),
    ("llama", {"architectures": "LlamaForCausalLM"}, '["LlamaForCausalLM"]'),
    ("llama", {"num_attention_heads": True}, "num_attention_heads is true"),
    ("llama", {"num_key_value_heads": 3}, "a divisor of num_attention_heads (4)"),
    ("llama", {"num_attention_heads": 5}, "hidden_size is 64; it must be a multiple of num_attention_heads (5)"),
    ("llama", {"head_dim": 15}, "even"),
    ("llama", {"hidden_act": "gelu"}, 'hidden_act is "gelu"; it must be "silu"'),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN; it must be a finite number above 0"),
    ("llama", {"eos_token_id": "</s>"}, "eos_token_id"),
    ("llama", {"eos_token_id": [1, 2.5]}, "or null"),
    ("llama", {"tie_word_embeddings": "yes"}, "true or false"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM"),
    ("llama", {"sliding_window": 4096}, "sliding_window is 4096; it must be null"),
    ("llama", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; it must be 1"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary"),
    ("llama", {"rope_scaling": {"type": "dynamic"}}, "factor is missing"),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "short_factor"),
    ("llama", {"rope_scaling": {"rope_type": "proportional", "factor": 2}}, "'proportional' is not supported"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1}}, "beta_fast is 1.0; it must be above"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2}, "rope_theta": 1}, "rope_theta is 1.0; it must be"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": -1}}, "mscale is -1; it must be a finite"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0; it must be a finite number"),
    ("llama", {"rope_scaling": {**LLAMA3, "low_freq_factor": 4}}, "high_freq_factor is 4.0"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 3}}, "disagree"),
    ("llama", {"rope_parameters": "default"}, "rope_parameters is \"default\"; it must be an object or null"),
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
    ("phi", {"partial_rotary_factor": 0.2}, "columns that is an even number"),
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
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "words"), CONFIGS)
def test_a_wrong_config_is_named_with_its_field(family: str, changes: Changes, words: str) -> None:
    assert re.search("^config.json: .*" + re.escape(words), refused(spec_of_config, family, **changes))


UNCOUNTED = [
    ({"hidden_size": None}, "has none of hidden_size, n_embd"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be an integer of at least 1"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must be a divisor"),
    ({"vocab_size": "many"}, 'vocab_size is "many"'),
]


@pytest.mark.parametrize(("changes", "words"), UNCOUNTED)
def test_a_config_of_no_known_family_that_cannot_be_counted(tmp_path: Path, changes: Changes, words: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", **sizes, **changes}))
    assert words in refused(spec_from_any_config, tmp_path / "config.json")


REPORTS = [
    ({"name": "shape:llama-3-70"}, "did you mean 'llama-3-70b'"),
    ({"name": "no-such-folder"}, "no model 'no-such-folder'"),
    ({"name": "demo", "dtype": "float17"}, "did you mean 'float1"),
    ({"name": "demo", "weights": "int5"}, "unknown weight format 'int5'"),
    ({"name": "demo", "cache": "int5"}, "cache.format"),
    ({"name": "demo", "changes": ("cache.grup=2",)}, "cache.grup: unknown key"),
]


@pytest.mark.parametrize(("asked", "words"), REPORTS)
def test_a_report_of_memory(asked: Changes, words: str) -> None:
    assert words in refused(report_for, **asked)


@pytest.mark.parametrize("text", ["", "GB", "80 PB", "-1GB", "0", "1e400GB", "nan"])
def test_a_size_in_bytes(text: str) -> None:
    assert "such as 80GB" in refused(parse_bytes, text)


COMPOSITIONS: list[tuple[Changes, str]] = [
    ({"sliding_windw": 3}, "attention: sliding_windw: unknown key; did you mean 'sliding_window'"),
    ({"sliding_window": 0}, "attention: sliding_window: Input should be greater .* 1, or 'full' .given 0.$"),
    (IDLE_SINKS, "num_sink_tokens: 2 has no effect with sliding_window: full"),
    ({"layers": {1: IDLE_SINKS}}, "num_sink_tokens: 2 has no effect with sliding_window: full"),
    ({"position": "none", "rotary": {"rope_theta": 9.0}}, "rotary: has no effect with position: none"),
    ({"sliding_window": "ful"}, "attention: sliding_window"),
    ({"position": "rotery"}, "position: Input should be 'rotary', 'alibi' or 'none'"),
    ({"pattern": ["window", "full"]}, "`window` needs a window in tokens, for example sliding_window: 128"),
    ({"sliding_window": 4, "pattern": ["windwo"]}, "'windwo' is not a kind of layer; known: window, full"),
    ({"kinds": {"near": {"sliding_window": 3}}}, "'near' does not occur in the pattern"),
    ({"kinds": {"near": {"sliding_windw": 3}}, "pattern": ["near"]}, "windw: unknown key"),
    ({"layers": {"x": {}}}, "layers"),
    ({"softcap": float("inf")}, "softcap: Input should be a finite number"),
    ({"mask": 3}, "mask"),
]
OF_A_MODEL = [
    ({"num_kv_heads": 4}, "attention of layer 0: 6 query heads cannot share 4 key/value heads evenly"),
    ({"num_sink_tokens": 4}, "attention of layer 0: num_sink_tokens 4 without a window"),
    ({"layers": {6: {"sliding_window": 3}}}, "there is no layer 6; the model has 0 to 5"),
]
OF_A_TRAINED_MODEL = [
    (
        {"num_kv_heads": 3},
        "blocks.0.attention: 2 key/value heads cannot become 3: one number must divide the other",
    ),
    ({"num_heads": 12}, "num_heads 12 where the trained model has 6; shape:NAME with random weights takes any"),
    ({"head_dim": 8}, "head_dim 8 where the trained model has 4"),
]


@pytest.mark.parametrize(("values", "words"), COMPOSITIONS)
def test_a_composition(values: Changes, words: str) -> None:
    assert re.search(words, refused(AttentionConfig.parse, values))


@pytest.mark.parametrize(("values", "words"), OF_A_MODEL)
def test_a_composition_that_a_model_cannot_have(values: Changes, words: str) -> None:
    assert words in refused(change_spec, SIX, AttentionConfig.parse(values))


@pytest.mark.parametrize(("values", "words"), OF_A_TRAINED_MODEL)
def test_a_composition_that_a_trained_model_cannot_become(values: Changes, words: str) -> None:
    spec = spec_of(layer(6, 2))
    state = weights_of(spec, torch.float32, 0)
    assert words in refused(change_attention, spec, state, AttentionConfig.parse(values))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_groups_that_divide_no_layers_matrices(place: int) -> None:
    """One layer of three has a feed-forward that groups of 8 do not divide, or heads."""
    fitting = in_eights(spec_of()).layers[0]
    format, kinds = WeightFormat.parse("int4", quant_group=8), [fitting] * 3
    format.check(spec_of(*kinds))
    for wrong, name, columns in (
        (fitting.model_copy(update={"intermediate_size": 12}), "feedforward.down", 12),
        (fitting.model_copy(update={"attention": layer(3, 1, 2).attention}), "attention.output", 6),
    ):
        spec, name = spec_of(*kinds[:place], wrong, *kinds[place + 1 :]), f"blocks.{place}.{name}.weight"
        words = f"{name}: INT4 groups of 8 do not divide {columns} columns; set weight_group"
        assert words in refused(format.check, spec)
        replace(format, own=((name, ((1, DENSE_MATRIX),)),)).check(spec)  # of a file in which that matrix is dense


def test_an_unknown_shape_gets_the_nearest_and_the_list() -> None:
    message = refused(named_shape, "Llama-3.1-8")
    assert re.search("no shape 'Llama-3.1-8'; did you mean 'llama-3.1-8b'.*known: tiny, ", message)
