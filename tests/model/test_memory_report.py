"""`workbench model memory`: published figures, units, configs of unread families, and the remarks on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.tiny import layer, spec_of
from tests.helpers.published_configs import DEEPSEEK_V3
from workbench.memory.report import cache_terms, describe_longest, estimate_memory, report_for
from workbench.model.hf.any_config import spec_from_any_config
from workbench.model.hf.families import config_from_spec
from workbench.model.recurrent.spec import ParallelRecurrentSpec, ShortConvSpec
from workbench.model.shapes import SHAPES, named_shape
from workbench.model.spec import LayerSpec, ModelSpec
from workbench.units import parse_bytes


def test_llama_3_70b() -> None:
    found = report_for("shape:llama-3-70b", context=128_000, dtype="float16")
    assert found["cache_bytes_per_token"] == 327_680
    assert found["cache_bytes"] == 41_943_040_000  # 41.9 GB
    assert found["weight_bytes"] == 2 * 70_553_706_496
    assert found["grouped_saving"] == 8.0
    assert found["beyond_model_context"] and "made for 8,192 positions" in found["remarks"][0]


def test_llama_2_13b() -> None:
    found = report_for("shape:llama-2-13b", context=8192, dtype="bfloat16")
    assert round(found["cache_bytes"] / 1e9, 1) == 6.7
    assert found["grouped_saving"] == 1.0


def test_what_fits_into_a_memory() -> None:
    one = report_for("shape:llama-3.1-8b", context=8192, memory="80GB")
    rest = 80 * 10**9 - one["weight_bytes"] - one["activation_bytes"]
    assert one["sequences"] == rest // (8192 * 131_072) > 0
    full = report_for("shape:llama-3.1-8b", context=8192, batch=one["sequences"], memory="80GB")
    assert full["total_bytes"] <= 80 * 10**9 < full["total_bytes"] + full["cache_bytes_per_sequence"]
    none = report_for("shape:llama-3-70b", context=128_000, memory="80GB")
    assert none["sequences"] == 0 and "weights and activations alone exceed 74.5 GiB" in none["remarks"]
    assert describe_longest(none) == "not even 1 of a single token" and "of up to" in describe_longest(one)
    assert describe_longest({"batch": 4, "longest_context": None}) == "4 of any length"
    assert describe_longest({"batch": 4, "longest_context": 1}) == "4 of up to 1 token each"


@pytest.mark.parametrize(("text", "size"), [("80GB", 80 * 10**9), ("1.5 GiB", 3 * 2**29), ("64mib", 2**26), ("12", 12)])
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def written(folder: Path, config: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


OLMOE_1B_7B = {
    "model_type": "olmoe", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 16, "intermediate_size": 1024, "vocab_size": 50304, "max_position_embeddings": 4096,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False,
    "clip_qkv": None, "tie_word_embeddings": False, "num_experts": 64, "num_experts_per_tok": 8,
    "norm_topk_prob": False, "eos_token_id": None,
}  # fmt: skip


def published_config(spec: ModelSpec) -> dict:
    """Return a config.json of a shape: a Llama's, or, of the one with experts, OLMoE's (published, but its end)."""
    return config_from_spec(spec) if spec.layers[0].experts is None else OLMOE_1B_7B


@pytest.mark.parametrize("name", SHAPES)
def test_a_family_that_is_read_is_exact(name: str, tmp_path: Path) -> None:
    spec, remarks = spec_from_any_config(written(tmp_path / name, published_config(named_shape(name))))
    assert (spec, remarks) == (named_shape(name), [])


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-2-13b"])
def test_shared_fields_give_the_same_shape(name: str, tmp_path: Path) -> None:
    """The config of a known model under an unknown family's name: the same count of everything."""
    config = config_from_spec(named_shape(name)) | {"model_type": "unknown-family"}
    spec, remarks = spec_from_any_config(written(tmp_path / name, config))
    assert (spec.num_parameters, spec.layers, spec.max_position_embeddings) == (
        named_shape(name).num_parameters, named_shape(name).layers, named_shape(name).max_position_embeddings,
    )  # fmt: skip
    assert "family 'unknown-family' is not supported" in remarks[0]


def test_gpt2_with_its_own_names(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    spec, remarks = spec_from_any_config(written(tmp_path / "gpt2", config))
    assert spec.num_parameters == 124_439_808 and not remarks
    assert (spec.max_position_embeddings, len(spec.layers), spec.layers[0].attention.num_kv_heads) == (1024, 12, 12)
    spec, remarks = spec_from_any_config(written(tmp_path / "gpt_neo", {**config, "model_type": "gpt_neo"}))
    assert spec.num_parameters == pytest.approx(124.4e6, rel=0.01)
    assert any("two matrices" in remark for remark in remarks)


def test_windows_experts_and_what_lies_inside(tmp_path: Path) -> None:
    inner = {
        "model_type": "x", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128, "vocab_size": 100, "sliding_window": 16,
        "sliding_window_pattern": 3,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": True,
    }  # fmt: skip
    spec, remarks = spec_from_any_config(written(tmp_path / "m", {"model_type": "outer", "text_config": inner}))
    assert [kind.attention.sliding_window for kind in spec.layers] == [16, 16, None, 16, 16, None]
    experts = spec.layers[0].experts
    assert (
        experts is not None
        and (spec.layers[0].intermediate_size, experts.num_experts, experts.num_experts_per_tok) == (32, 4, 2)
        and spec.tie_word_embeddings
    )
    assert any("only the decoder under text_config" in remark for remark in remarks)
    kinds = ["full_attention", "sliding_attention"] * 3
    spec, _ = spec_from_any_config(written(tmp_path / "n", inner | {"layer_types": kinds}))
    assert [kind.attention.sliding_window for kind in spec.layers] == [None, 16] * 3
    spec, _ = spec_from_any_config(written(tmp_path / "o", inner | {"use_sliding_window": False}))
    assert [kind.attention.sliding_window for kind in spec.layers] == [None] * 6


def test_latent_attention_and_experts_by_their_fields(tmp_path: Path) -> None:
    """DeepSeek-V3 under another name: 671 billion parameters, and 70 kB a token in bfloat16, as published."""
    file = written(tmp_path / "deepseek", DEEPSEEK_V3)
    spec, _ = spec_from_any_config(file)
    assert spec.num_parameters == pytest.approx(671e9, rel=0.001)
    found = report_for(str(file), context=1000)
    assert found["cache_bytes_per_token"] == 61 * (512 + 64) * 2 and found["grouped_saving"] is None
    assert found["cache_bytes"] == 1000 * found["cache_bytes_per_token"]


def test_terms_of_layers_that_cache_otherwise_add_up() -> None:
    """Layers with a state in place of keys and values or beside them, and one that reads another's."""
    conv = ShortConvSpec(channels=6)
    beside = layer(4, 2).model_copy(update={"beside": ParallelRecurrentSpec(recurrent=conv)})
    spec = spec_of(LayerSpec(attention=conv, intermediate_size=12), layer(), layer(kv_shared_with=1), beside)
    counted = estimate_memory(spec, context=33, page_size=4)
    states = 2 * 2 * conv.state_bytes  # the one that a step reads and the one that it writes, in two layers
    assert counted.memory.sequence_bytes == states + 36 * (2 * 4 + 2 * 2 * 4) * 2
    assert sum(term.bytes for term in cache_terms(counted)) == counted.memory.sequence_bytes


def test_terms_of_a_codec_of_groups_add_up() -> None:
    """Old tokens as the codec stores them, new ones dense; a codec to be calibrated has sizes without any sample."""
    for name, group in (("tests.engine.tiny:HalvedGroups", 8), ("tests.engine.test_calibration:ByHead", None)):
        changes = (f"cache.codec={name}", "cache.residual_length=8")
        counted = estimate_memory(spec_of(layer(4, 2), layer()), context=64, page_size=8, changes=changes)
        terms = cache_terms(counted)
        assert len(terms) == (4 if group else 2), terms
        assert sum(term.bytes for term in terms) == counted.memory.sequence_bytes
