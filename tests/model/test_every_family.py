"""Every family that is read, on random checkpoints of transformers' own: logits and greedy tokens equal theirs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.steps import forced
from tests.engine.tiny import finals, runner_of
from tests.thorough import tries
from workbench.engine import naive
from workbench.model.hf.families import FAMILIES, read_spec
from workbench.model.hf.weights import load_weights
from workbench.model.transformer import Transformer
from workbench.request import Request, SamplingParameters

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'transformers>=5'")
BOUND = 2e-5  # of the largest logit
EVERYWHERE: dict[str, Any] = {
    "vocab_size": 131, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 3,
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96,
}  # fmt: skip
NAMES_OF_ITS_OWN: dict[str, dict[str, str]] = {
    "gpt2": {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
             "max_position_embeddings": "n_positions", "intermediate_size": "n_inner"},
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "mpt": {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len"},
}  # fmt: skip
NAMES_OF_ITS_OWN["gptj"] = NAMES_OF_ITS_OWN["gpt2"]
WITHOUT_GROUPS = ("gpt2", "gptj", "gpt_neox", "opt", "bloom", "mpt", "falcon")
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {
    "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_shared_experts": 2,
}  # fmt: skip
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 7}
CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": ({}, {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "mistral": ({"sliding_window": 7},),
    "ministral": ({"sliding_window": 7, "head_dim": 16},),
    "qwen2": ({}, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen3": ({"head_dim": 24},),
    "gemma": ({"head_dim": 24},),
    "gemma2": (GEMMA,),
    "gemma3_text": (GEMMA,),
    "phi": ({}, {"qk_layernorm": True, "partial_rotary_factor": 0.25}),
    "phi3": ({"sliding_window": 7}, {"sliding_window": None, "partial_rotary_factor": 0.5}),
    "olmo": ({"clip_qkv": 0.8},),
    "olmo2": ({}, {"num_key_value_heads": 4}),
    "olmo3": ({"sliding_window": 7},),
    "smollm3": ({},),
    "granite": (MULTIPLIERS,),
    "cohere": ({}, {"use_qk_norm": True}),
    "cohere2": ({"sliding_window": 7},),
    "starcoder2": ({"sliding_window": 7}, {"use_bias": False}),
    "stablelm": (
        {"partial_rotary_factor": 0.5},
        {"partial_rotary_factor": 0.5, "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "gpt2": ({}, {"scale_attn_weights": False}),
    "gpt_neox": ({"rotary_pct": 0.25}, {"rotary_pct": 0.5, "use_parallel_residual": False}),
    "gptj": ({"rotary_dim": 8},),
    "falcon": (
        {"multi_query": True}, {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"multi_query": False, "bias": True, "parallel_attn": False},
        {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1},
    ),
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 64},),
    "bloom": ({},),
    "mpt": ({}, {"attn_config": {"clip_qkv": 0.8}}),
    "nemotron": ({}, {"mlp_bias": True, "attention_bias": True}),
    "exaone4": ({"sliding_window": 7, "sliding_window_pattern": 4},),
    "glm": ({"head_dim": 16},),
    "glm4": ({"head_dim": 16, "attention_bias": True},),
    "ernie4_5": ({"head_dim": 16, "use_bias": True},),
    "seed_oss": ({"head_dim": 16},),
    "helium": ({"head_dim": 16},),
    "arcee": ({},),
    "hunyuan_v1_dense": ({"head_dim": 16},),
    "mixtral": ({"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7},),
    "qwen2_moe": (
        {**QWEN_EXPERTS, "shared_expert_intermediate_size": 40},
        {**QWEN_EXPERTS, "shared_expert_intermediate_size": 40, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "qwen3_moe": ({**QWEN_EXPERTS, "mlp_only_layers": [1], "head_dim": 16, "norm_topk_prob": True},),
    "olmoe": ({"num_experts": 6, "num_experts_per_tok": 2},),
    "granitemoe": ({**MULTIPLIERS, "num_local_experts": 6, "num_experts_per_tok": 2},),
    "deepseek_v2": (
        {**DEEPSEEK, "topk_method": "greedy"},
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 2.0, "q_lora_rank": None},
    ),
    "deepseek_v3": ({**DEEPSEEK, "n_group": 4, "topk_group": 2}, {**DEEPSEEK, "n_group": 1, "topk_group": 1}),
    "gpt_oss": ({"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7},),
}  # fmt: skip
EVERY = [(family, changes) for family, cases in CASES.items() for changes in cases]


def theirs_of(family: str, changes: dict[str, Any], seed: int = 0) -> Any:
    """A model of transformers in which no parameter is at a value that hides it."""
    import transformers

    own = NAMES_OF_ITS_OWN.get(family, {})
    left_out = ("num_key_value_heads", "intermediate_size")[: 2 if family in ("bloom", "mpt", "opt") else 1]
    left_out = left_out if family in WITHOUT_GROUPS else ()
    values = {**{own.get(key, key): value for key, value in EVERYWHERE.items() if key not in left_out}, **changes}
    config = transformers.AutoConfig.for_model(family, **values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *biases]:
            if name.endswith("weight") and parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                size = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
                parameter.normal_(0, size, generator=generator)
    return model


def ours_of(theirs: Any, folder: Path) -> Transformer:
    theirs.save_pretrained(folder)
    spec = read_spec(folder)
    return Transformer.from_state(spec, load_weights(folder, spec, torch.float32))


@torch.no_grad()
def logits_of(theirs: Any, ids: Tensor) -> Tensor:
    return theirs(ids[None]).logits[0]


def assert_equal(given: Tensor, expected: Tensor) -> None:
    assert given.shape == expected.shape
    assert (given - expected).abs().max() <= BOUND * max(1.0, expected.abs().max().item())


def draw_ids(count: int, seed: int) -> Tensor:
    return torch.randint(4, EVERYWHERE["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


def test_every_family_has_a_case() -> None:
    assert set(CASES) == set(FAMILIES)


@pytest.mark.parametrize(("family", "changes"), EVERY, ids=lambda each: each if isinstance(each, str) else "")
def test_logits_and_tokens_are_theirs(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Whole, without cache; in chunks and token by token from pages; batched with others, after a prefix hit."""
    theirs = theirs_of(family, changes)
    model, ids = ours_of(theirs, tmp_path), draw_ids(40, 1)
    assert model.spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    expected = logits_of(theirs, ids)
    assert_equal(naive.logits(model, ids), expected)
    assert_equal(model.logits(ids), expected)
    assert_equal(forced(model, ids, chunks=(11, 6)), expected[[10, *range(16, len(ids))]])
    prompts = {"a": ids[:21].tolist(), "b": draw_ids(9, 2).tolist(), "c": ids[:26].tolist(), "d": ids[:21].tolist()}
    runner = runner_of(model, prefix="radix", max_num_seqs=2, pages=60)
    greedy = SamplingParameters(temperature=0, max_tokens=4, ignore_eos=True)
    found = finals(runner, [Request(name, tuple(each), greedy) for name, each in prompts.items()])
    for name, prompt in prompts.items():
        text = list(prompt)
        for token in found[name]:
            best = logits_of(theirs, torch.tensor(text))[-1].topk(2)
            clear = best.values[0] - best.values[1] > 4 * BOUND * best.values[0].abs()
            assert not clear or token == int(best.indices[0]), f"request {name} after {len(text)} tokens"
            text.append(token)


@settings(max_examples=tries(24))
@given(st.data())
def test_logits_are_theirs_for_sizes_of_any_kind(data: st.DataObject) -> None:
    """Groups whose share differs from their number, windows around the text's length, widths that are no power of 2."""
    family, changes = data.draw(st.sampled_from([each for each in EVERY if each[0] not in ("opt", "mpt", "bloom")]))
    heads, share = data.draw(st.sampled_from([(6, 3), (6, 2), (3, 3), (2, 1), (4, 4)]))
    dim, length = data.draw(st.sampled_from([8, 12, 16])), data.draw(st.integers(2, 24))
    drawn: dict[str, Any] = {"num_hidden_layers": data.draw(st.integers(1, 4))}
    if family not in WITHOUT_GROUPS and not family.startswith("deepseek"):
        drawn |= {"num_attention_heads": heads, "num_key_value_heads": heads // share, "hidden_size": heads * dim}
        drawn |= {"head_dim": dim} if "head_dim" in changes else {}
    if isinstance(changes.get("sliding_window"), int):
        drawn["sliding_window"] = data.draw(st.integers(max(1, length - 2), length + 2))
    if "partial_rotary_factor" in changes and dim == 12:
        drawn["partial_rotary_factor"] = 0.5
    if data.draw(st.booleans()):
        drawn["tie_word_embeddings"] = family not in ("phi", "gptj", "deepseek_v2", "deepseek_v3")
    own = NAMES_OF_ITS_OWN.get(family, {})
    theirs = theirs_of(family, {**changes, **{own.get(key, key): value for key, value in drawn.items()}}, length)
    with tempfile.TemporaryDirectory() as folder:
        model = ours_of(theirs, Path(folder))
    ids = draw_ids(length, 3)
    expected = logits_of(theirs, ids)
    assert_equal(naive.logits(model, ids), expected)
    assert_equal(model.logits(ids), expected)
