"""`workbench model check`: the table of a model, its refusals and exit codes, and a difference that is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.command_line import answer, cli
from workbench.check import report, transformers_model
from workbench.check.mechanisms import describe_mechanisms
from workbench.check.report import check_model
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import BUNDLED_MODELS, LoadedModel
from workbench.errors import WorkbenchError
from workbench.executors.capabilities import COLUMNS
from workbench.kv_cache.format import FORMATS
from workbench.machine.ceilings import Ceiling, MachineCeilings
from workbench.model.hf.convert_gguf import convert_to_gguf
from workbench.model.hf.families import spec_from_config
from workbench.model.spec import ModelSpec
from workbench.testing.family_checkpoints import CONFIGS, SIZES, random_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Qwen 3 folder made by transformers."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'transformers>=5'")
    random_checkpoint("qwen3", CONFIGS["qwen3"][0]).save_pretrained(tmp_path)
    return tmp_path


def changed(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


def test_a_model_that_is_right(folder: Path) -> None:
    ran = cli("model check --json", folder)
    found = ran.json
    assert ran.err == "" and found["problem"] is None and found["family"] == "qwen3"
    assert found["comparison"]["equal"] and found["comparison"]["places"] == 58
    assert found["mechanisms"]["norm of queries and keys"] == "each head"
    assert found["memory"]["weight_bytes"]["dense"] == found["files"]["bytes"]
    assert found["speed"]["decode_tokens_per_s"] > 0 < found["speed"]["prefill_tokens_per_s"]
    shown = cli("model check", folder).text
    assert "58 places in the layers compared, on texts of 47 tokens" in shown
    assert "4 query heads on 2 key/value heads of 24" in shown


@pytest.mark.parametrize(("name", "why"), [("shape:tiny", "random weights"), ("demo", None)])
def test_shapes_and_shipped_models(name: str, why: str | None) -> None:
    found = check_model(name, compare=name != "demo")
    assert found["problem"] is None and (why or "not asked for") in found["comparison"]["skipped"]
    assert (found["tokenizer"] is None) == name.startswith("shape:")


def test_a_bound_counts_the_bytes_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file of 4 bits a decode step reads a third of the dense bytes, so that it may be three times as fast."""

    def planted(*sizes: int, dtypes: tuple[str, ...], **_: object) -> MachineCeilings:
        plain = Ceiling("read", 1e9, "", "", 1, 1, 1.0, sizes[0], others_cpu_share=1.0)
        return MachineCeilings((plain,), tuple(replace(plain, value=1e15, dtype=each) for each in dtypes))

    monkeypatch.setattr(report, "ceilings_for", planted)
    convert_to_gguf(BUNDLED_MODELS["demo"], tmp_path / "a.gguf", "q4_0", torch.bfloat16)
    found, dense = (check_model(name, compare=False) for name in (str(tmp_path / "a.gguf"), "demo"))
    assert found["speed"]["weight_bytes"] < 0.5 * dense["speed"]["weight_bytes"]
    assert found["speed"]["weight_bytes"] == pytest.approx(found["files"]["bytes"], rel=0.1)
    assert found["speed"]["decode_tokens_per_s"] > 2 * dense["speed"]["decode_tokens_per_s"]
    assert found["speed"]["measured_beside_work"]
    kept = found["stored"]
    assert kept["widened"] == [] and kept["bytes"] == kept["file_bytes"] > 0.9 * found["files"]["bytes"]
    assert dense["stored"]["bytes"] == dense["stored"]["file_bytes"] == 0


def test_a_gguf_file_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are dequantized by packages that are not ours, at every place that a folder has."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason=f"transformers reads GGUF by {package}: pip install {package}")
    convert_to_gguf(BUNDLED_MODELS["demo"], tmp_path / "a.gguf", "q4_0", torch.bfloat16)
    found = answer("model check", tmp_path / "a.gguf")["comparison"]
    assert found["equal"] and found["places"] > 50 and not found["places_left_out"]
    monkeypatch.setattr(transformers_model, "find_spec", lambda name: None if name == "accelerate" else name)
    skipped = answer("model check", tmp_path / "a.gguf")["comparison"]["skipped"]
    assert skipped == "not installed: pip install accelerate"


def test_what_is_said_of_backends_is_what_loading_does() -> None:
    """Each yes and no of the blocks' columns is what selecting that backend says."""
    found = check_model("demo", compare=False)["carried_out"]
    assert list(found) == [*(f"{name} cache" for name in FORMATS), "int8 weights", "int4 weights"]
    for row, columns in found.items():
        kind, what = row.split()
        config = EngineConfig.build("demo", **({"cache": kind} if what == "cache" else {"weights": kind}))
        for column, reason in columns.items():
            backend, role = COLUMNS[column]
            if role != "blocks":
                continue
            try:
                LoadedModel.load(config.model_copy(update={"backend": str(backend)}), lambda line: None)
            except WorkbenchError as error:
                assert reason is not None and reason in str(error)
            else:
                assert reason is None, (row, column)


def test_a_family_that_is_not_read_is_refused_and_its_sizes_are_shown(folder: Path) -> None:
    changed(folder, model_type="unknown_family")
    found = answer("model check", folder, code=1)
    assert "model_type 'unknown_family' is not supported" in found["problem"] and found["sizes"]["layers"] == 4
    assert "mechanisms" not in found and "carried_out" not in found
    shown = cli("model check", folder, code=1).text
    assert "refused:" in shown and "4 layers of 64" in shown


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope_parameters": {"rope_type": "unheard_of", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'unheard_of'"),
        ({"intermediate_size": 52}, "config.json asks for [52, 64]"),
        ({"num_hidden_layers": 3, "layer_types": None}, "has extra model.layers.3"),
    ],
)
def test_a_key_that_is_not_carried_out_and_weights_of_another_model_are_refused(
    folder: Path, keys: dict[str, Any], words: str
) -> None:
    changed(folder, **keys)
    found = check_model(str(folder))
    assert words in found["problem"] and found["comparison"] == {"skipped": "the model cannot be loaded"}
    assert found["sizes"]["hidden_size"] == 64 and found["memory"]["weight_bytes"]["dense"] > 0


def test_a_difference_ends_with_code_1_and_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if our reader had missed the base of the rotary embedding."""
    from workbench.check import transformers_model

    def with_another_base(spec: ModelSpec, *arguments: Any) -> Any:
        rotary = spec.rotary.model_copy(update={"rope_theta": 77.0})
        return built(spec.model_copy(update={"rotary": rotary}), *arguments)

    built = transformers_model.Transformer.from_state
    monkeypatch.setattr(transformers_model.Transformer, "from_state", with_another_base)
    assert "layer 0, rotary angles, from position 1 on" in cli("model check", folder, code=1).text


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    found = check_model(str(folder))
    assert "holds no weights" in found["problem"] and found["mechanisms"]


def test_too_little_memory_is_said_before_both_models_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.check import transformers_model

    monkeypatch.setattr(transformers_model, "available_bytes", lambda: 1000)
    assert "1,000 B are free" in check_model(str(folder))["comparison"]["skipped"]


LLAMA4 = CONFIGS["llama4_text"][0]
WORDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "llama": ({}, "attention", "grouped: 4 query heads on 2 key/value heads of 16"),
    "gemma2": ({"sliding_window": 7}, "windows", "7 tokens (layers 0, 2)"),
    "gemma": ({}, "norm", "root mean square, eps 1e-06, weights + 1"),
    "cohere2": ({"sliding_window": 7}, "place of norms", "before both parts, which are parallel"),
    "mixtral": ({}, "router", "softmax of all, weights divided by their sum"),
    "qwen2": ({}, "biases", "queries, keys and values"),
    "gpt_oss": ({}, "scores", "a learned sink logit a head"),
    "phimoe": ({}, "router", "SparseMixer"),
    "phi3": (
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 24,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "attention_factor": 1.0,
            }
        },
        "positions",
        "rotary of base 10,000, LongRoPE: each of 8 frequencies by its own factor, another beyond 24 tokens",
    ),
    "llama4_text": (LLAMA4, "windows", "chunks of 7 tokens, each seen from within alone (layers 0-2)"),
    "falcon_h1": (
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "ssm_out_multiplier": 0.5}, "beside attention",
        "recurrent: mamba2, recurrent output scale 0.5",
    ),
    "gemma3n_text": (
        {"head_dim": 16, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 12},
        "residual streams",
        "4, of which layers compute number 0; a residual of rank 64; 12 columns of each layer's own from a table of "
        "262,144",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", WORDS)
def test_mechanisms_are_described(family: str) -> None:
    keys, mechanism, words = WORDS[family]
    found = describe_mechanisms(spec_from_config({**SIZES, **keys, "model_type": family}, family))
    assert found[mechanism] == words
    assert {"norm", "place of norms", "attention", "positions", "feed-forward", "embedding"} <= set(found)
