"""Fields of config.json, present and absent: names old and new, windows by layer, rotaries, end tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from tests.model.families import COMMON, spec_of_config
from tests.model.strategies import llama_specs
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.model.attention_spec import AttentionSpec, RotaryConfig, RotaryScaling
from workbench.model.hf.families import FAMILIES, config_from_spec, read_spec, spec_from_config
from workbench.model.shapes import named_shape
from workbench.model.spec import ModelSpec

PLAIN = {"model_type": "llama", **COMMON}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def read(family: str = "llama", /, **changes: object) -> ModelSpec:
    return spec_of_config(family, **changes)


@given(llama_specs())
def test_a_spec_survives_its_own_config(spec: ModelSpec) -> None:
    config = json.loads(json.dumps(config_from_spec(spec, torch.float32)))
    assert spec_from_config(config, spec.name) == spec


@given(llama_specs(), st.dictionaries(st.text().map("x_".__add__), st.integers()))
def test_unknown_keys_change_nothing(spec: ModelSpec, unknown: dict[str, int]) -> None:
    assert spec_from_config({**config_from_spec(spec), **unknown}, spec.name) == spec


@given(llama_specs())
def test_old_and_new_rotary_fields_say_the_same(spec: ModelSpec) -> None:
    old = config_from_spec(spec)
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    inner = old["rope_scaling"] or {"rope_type": "default"}
    new["rope_parameters"] = {**inner, "rope_theta": old["rope_theta"]}
    assert spec_from_config(new, spec.name) == spec


@pytest.mark.parametrize(("given", "ids"), [(7, (7,)), ([7, 9, 7], (7, 9)), (None, ()), ([], ())])
def test_end_tokens(given: object, ids: tuple[int, ...]) -> None:
    assert read(eos_token_id=given).eos_token_ids == ids


@pytest.mark.parametrize(
    ("changes", "rotary"),
    [
        ({"rope_theta": 5e5}, RotaryConfig(rope_theta=5e5)),
        ({"rope_scaling": None, "rope_parameters": {}}, RotaryConfig()),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 7},
         RotaryConfig(rope_theta=7, scaling=RotaryScaling(kind="linear", factor=2))),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RotaryConfig(rope_theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 7}, RotaryConfig(rope_theta=5e5)),
        ({"rope_scaling": LLAMA3, "rope_theta": 5e5},
         RotaryConfig(rope_theta=5e5, scaling=RotaryScaling(
             kind="llama3", factor=8, low_freq_factor=1, high_freq_factor=4))),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_scaling": {**LLAMA3, "rope_theta": 5e5}},
         RotaryConfig(rope_theta=5e5, scaling=RotaryScaling(
             kind="llama3", factor=8, low_freq_factor=1, high_freq_factor=4))),
    ],
)  # fmt: skip
def test_rotary_fields(changes: dict[str, object], rotary: RotaryConfig) -> None:
    assert read(**changes).rotary == rotary


def test_harmless_keys_are_accepted() -> None:
    assert read(sliding_window=4096, use_sliding_window=False, pretraining_tp=2, attention_dropout=0.1) == read()
    assert read(layer_types=["full_attention"] * 6, quantization_config=None, partial_rotary_factor=1) == read()


def test_layers_that_a_llama_config_cannot_say_are_not_exported() -> None:
    spec = named_shape("tiny")
    layer = spec.layers[0]
    windowed = layer.model_copy(update={"attention": layer.attention.model_copy(update={"sliding_window": 8})})
    half = layer.model_copy(update={"attention": layer.attention.model_copy(update={"qkv_bias": True})})
    for layers in [(layer, windowed), (windowed,), (half,), ()]:
        refuses("a Llama config", config_from_spec, spec.model_copy(update={"layers": layers}))


def test_a_folder_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    refuses("no such folder", read_spec, folder)
    folder.mkdir()
    refuses("no config.json", read_spec, folder)
    (folder / "config.json").write_text(json.dumps({**PLAIN, "eos_token_id": 3}))
    assert read_spec(folder) == read(eos_token_id=3).model_copy(update={"name": "my-model"})
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert read_spec(folder).eos_token_ids == (3, 5)
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    assert read_spec(str(folder)).eos_token_ids == (3,)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b"1" * 5000, b"{'model_type': 'llama'}"]
)
def test_a_corrupt_config_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    refuses(re.escape(str(tmp_path / "config.json")), read_spec, tmp_path)


def test_the_hugging_face_cache_gives_the_name_of_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "models--some-org--some-model" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(PLAIN))
    assert read_spec(folder).name == "some-org/some-model"


def attention_of(spec: ModelSpec, layer: int = 0) -> AttentionSpec:
    attention = spec.layers[layer].attention
    assert isinstance(attention, AttentionSpec)
    return attention


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.sliding_window for layer in spec.layers]


def test_windows_by_a_pattern_of_letters() -> None:
    assert windows(read("exaone4", sliding_window_pattern="LG")) == [4096, None] * 3
    assert windows(read("exaone4", sliding_window_pattern="LLLG")) == [4096] * 3 + [None, 4096, None]
    full = ["full_attention"] * 6
    assert windows(read("exaone4", sliding_window_pattern="LLLG", layer_types=full)) == [None] * 6


def test_a_window_that_is_null_is_none() -> None:
    """transformers reads such a ministral and fails in its first step."""
    assert windows(read("ministral", sliding_window=None)) == [None] * 6


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


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-3, 9) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_keys = st.sampled_from([
    *COMMON, "head_dim", "hidden_act", "eos_token_id", "hidden_activation", "rope_scaling", "rope_parameters",
    "rope_theta",
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
