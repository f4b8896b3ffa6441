from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.strategies import llama_specs
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.model.attention_spec import AttentionSpec, RotaryConfig, RotaryScaling
from workbench.model.hf.families import config_from_spec, read_spec, spec_from_config
from workbench.model.shapes import named_shape
from workbench.model.spec import ModelSpec

PLAIN = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**changes: object) -> ModelSpec:
    """PLAIN with `changes`; a change to `...` takes the field out."""
    config = {key: value for key, value in {**PLAIN, **changes}.items() if value is not ...}
    return spec_from_config(config, "some", "folder/config.json")


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


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_keys = st.sampled_from([*PLAIN, "head_dim", "hidden_act", "rope_scaling", "rope_theta", "eos_token_id", "layer_types"])


@settings(max_examples=tries(300))
@given(st.dictionaries(_keys, _json, max_size=3))
def test_any_json_is_a_spec_or_a_clear_error(changes: dict[str, object]) -> None:
    try:
        assert read(**changes).layers
    except WorkbenchError as error:
        assert "folder/config.json" in str(error) and "\n" not in str(error)


def test_absent_fields_have_the_defaults_of_transformers() -> None:
    spec = read()
    attention = spec.layers[0].attention
    assert isinstance(attention, AttentionSpec)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 4, 16)
    assert not (attention.qkv_bias or attention.o_proj_bias or spec.layers[0].mlp_bias or spec.tie_word_embeddings)
    assert (spec.norm.eps, spec.rotary, spec.eos_token_ids) == (1e-6, RotaryConfig(), ())


def test_biases_are_on_all_of_attention_or_none() -> None:
    attention = read(attention_bias=True, mlp_bias=True).layers[0].attention
    assert isinstance(attention, AttentionSpec)
    assert attention.qkv_bias and attention.o_proj_bias
    assert read(mlp_bias=True).layers[0].mlp_bias


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not read; read now: llama, mistral"),
        ({"model_type": ...}, "model_type is missing"),
        ({"vocab_size": ...}, "vocab_size is missing; it must be an integer of at least 1"),
        ({"hidden_size": "64"}, 'hidden_size is "64"; it must be an integer'),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be an integer of at least 1"),
        ({"num_hidden_layers": 10**12}, "it must be an integer of at most 10000"),
        ({"rope_theta": 10**400}, "it must be a finite number above 0"),
        ({"architectures": "LlamaForCausalLM"}, '["LlamaForCausalLM"]'),
        ({"num_attention_heads": True}, "num_attention_heads is true"),
        ({"num_key_value_heads": 3}, "a divisor of num_attention_heads (4)"),
        ({"num_attention_heads": 5}, "hidden_size is 64; it must be a multiple of num_attention_heads (5)"),
        ({"head_dim": 15}, "even"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; it must be "silu"'),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN; it must be a finite number above 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": -1}, "or null"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM"),
        ({"sliding_window": 4096}, "sliding_window is 4096; it must be null"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; it must be 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"rope_scaling": {"type": "dynamic"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2}}, "rope type 'proportional' is not carried"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 1}}, "beta_fast is 1.0; it must be above"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}, "rope_theta": 1}, "rope_theta is 1.0; it must be"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": -1}}, "mscale is -1; it must be a finite"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0; it must be a finite number"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4}}, "high_freq_factor is 4.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 3}}, "disagree"),
        ({"rope_parameters": "default"}, "rope_parameters is \"default\"; it must be an object or null"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_named_with_its_field(changes: dict[str, object], said: str) -> None:
    with pytest.raises(WorkbenchError, match="^folder/config.json: .*" + re.escape(said)):
        read(**changes)


def test_harmless_keys_are_accepted() -> None:
    assert read(sliding_window=4096, use_sliding_window=False, pretraining_tp=2, attention_dropout=0.1) == read()
    assert read(layer_types=["full_attention"] * 2, quantization_config=None, partial_rotary_factor=1) == read()


def test_what_a_llama_config_cannot_say_is_not_exported() -> None:
    spec = named_shape("tiny")
    layer = spec.layers[0]
    windowed = layer.model_copy(update={"attention": layer.attention.model_copy(update={"sliding_window": 8})})
    half = layer.model_copy(update={"attention": layer.attention.model_copy(update={"qkv_bias": True})})
    for layers in [(layer, windowed), (windowed,), (half,), ()]:
        with pytest.raises(WorkbenchError, match="a Llama config"):
            config_from_spec(spec.model_copy(update={"layers": layers}))


def test_a_folder_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    with pytest.raises(WorkbenchError, match="no such folder"):
        read_spec(folder)
    folder.mkdir()
    with pytest.raises(WorkbenchError, match="no config.json"):
        read_spec(folder)
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
    with pytest.raises(WorkbenchError, match=re.escape(str(tmp_path / "config.json"))):
        read_spec(tmp_path)


def test_the_hugging_face_cache_gives_the_name_of_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "models--some-org--some-model" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(PLAIN))
    assert read_spec(folder).name == "some-org/some-model"
