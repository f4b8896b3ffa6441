"""Converted models load with the codes and scales that the same settings make of the source, and others read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.command_line import cli, refused
from tests.model.families import draw_ids, logits_of
from tests.model.formats.folders import TINY, same, write_quantized
from tests.model.strategies import llama_specs
from tests.thorough import tries
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import BUNDLED_MODELS, LoadedModel
from workbench.errors import WorkbenchError
from workbench.model.formats.open import open_checkpoint
from workbench.model.formats.texts import open_chat_template, open_tokenizer
from workbench.model.hf.convert import convert_model
from workbench.model.hf.convert_gguf import convert_to_gguf
from workbench.model.hf.families import read_spec
from workbench.model.hf.kept import cost_of_widening, stored_format
from workbench.model.hf.save import save_folder
from workbench.model.hf.weights import load_weights, random_weights, wanted_parameters
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenization.tokenizer_files import read_tokenizer
from workbench.testing import packers
from workbench.testing.family_checkpoints import random_checkpoint

INT4, INT8 = WeightFormat.parse("int4", "dense", 32), WeightFormat.parse("int8", "dense")
FORMATS = [INT4, INT8, WeightFormat.parse("int4", "int4", 16), WeightFormat.parse("int8", "int8")]


def model_of(folder: Path, **options: object) -> Transformer:
    return LoadedModel.load(EngineConfig.build(folder, backend="eager", **options), lambda line: None).transformer


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_converted_model_is_the_one_that_settings_make(
    tmp_path: Path, format: WeightFormat, dtype: torch.dtype
) -> None:
    state = random_weights(TINY, dtype, seed=2)
    save_folder(tmp_path / "m", TINY, state, dtype)
    found = convert_model(tmp_path / "m", tmp_path / "q", format, dtype)
    assert found["matrices"] == 7 * len(TINY.layers) + (not format.head.is_dense)
    assert found["bytes"] < 0.8 * (tmp_path / "m" / "model.safetensors").stat().st_size
    asked = Transformer.from_state(TINY, state, format=format)
    converted = load_weights(tmp_path / "q", TINY, dtype, format)
    assert same({name: each for name, each in asked.state_dict().items() if name in converted}, converted)
    assert len(converted) == len([name for name in asked.state_dict() if "rotary" not in name])


def test_the_demo_keeps_its_tokenizer_and_its_logits(tmp_path: Path) -> None:
    """Untied or tied: a tied head stays dense in files."""
    source = BUNDLED_MODELS["demo"]
    cli("model convert demo --weights int4 --group 32", tmp_path / "q")
    own = {"weights": "int4", "weight_group": 32, "head_weights": "dense"}
    asked, found = model_of(source, **own), model_of(tmp_path / "q")
    assert found.format == INT4
    assert torch.equal(asked.logits(range(40)), found.logits(range(40)))
    names = {file.name for file in source.iterdir() if not file.name.endswith(".safetensors")}
    assert names <= {file.name for file in (tmp_path / "q").iterdir()}
    refused("model convert demo", tmp_path / "q")  # it is there


@settings(max_examples=tries(25))
@given(llama_specs() | llama_specs(8), st.sampled_from(["int4", "int8"]), st.sampled_from([2000, 10**9]))
def test_any_model_is_converted(
    tmp_path_factory: pytest.TempPathFactory, spec: ModelSpec, kind: str, shard_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("m")
    format = WeightFormat.parse(kind, "dense", 8)
    save_folder(folder / "m", spec, random_weights(spec, torch.float32), torch.float32)
    try:
        convert_model(folder / "m", folder / "q", format, torch.float32, shard_bytes)
    except WorkbenchError as error:  # odd sizes
        assert "do not divide" in str(error)
        return
    assert read_spec(folder / "q") == read_spec(folder / "m").model_copy(update={"name": "q"})
    asked = Transformer.from_state(spec, random_weights(spec, torch.float32), format=format).state_dict()
    converted = load_weights(folder / "q", spec, torch.float32, format)
    assert same({name: asked[name] for name in converted}, converted)
    dense = folder / "dense"
    convert_model(folder / "q", dense, WeightFormat(), torch.float32)
    values = [load_weights(each, spec, torch.float32) for each in (folder / "q", dense)]
    assert same(*values) and "quantization_config" not in json.loads((dense / "config.json").read_text())
    convert_model(folder / "q", folder / "again", format, torch.float32)
    assert same(load_weights(folder / "again", spec, torch.float32, format), converted)  # codes, not new ones


def test_codes_of_other_formats_are_kept(tmp_path: Path) -> None:
    """GPTQ's own codes, in compressed-tensors' layout."""
    write_quantized(tmp_path / "m", packers.gptq)
    convert_model(tmp_path / "m", tmp_path / "q", INT4, torch.float32)
    assert same(*(load_weights(tmp_path / each, TINY, torch.float32) for each in ("m", "q")))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("demo --weights int3", "unknown weight format"),
        ("demo --weights int4 --head-weights int8", "make the head dense, or like blocks"),
        ("demo --weights int4 --group 48", "do not divide"),
        ("shape:tiny", "has no weights to convert"),
        ("demo --to onnx", "must be one of compressed-tensors"),
        ("nowhere", "not a folder here"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, words: str, said: str) -> None:
    assert said in refused(f"model convert {words}", tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_a_head_that_is_the_embedding_stays_dense(tmp_path: Path) -> None:
    spec = TINY.model_copy(update={"tie_word_embeddings": True})
    save_folder(tmp_path / "m", spec, random_weights(spec, torch.float32), torch.float32)
    with pytest.raises(WorkbenchError, match="its head is the embedding"):
        convert_model(tmp_path / "m", tmp_path / "q", WeightFormat.parse("int8", "int8"), torch.float32)
    convert_model(tmp_path / "m", tmp_path / "q", INT8, torch.float32)
    assert load_weights(tmp_path / "q", spec, torch.float32)


@pytest.mark.parametrize("format", [INT4, INT8], ids=str)
def test_transformers_reads_it(tmp_path: Path, format: WeightFormat) -> None:
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    transformers = pytest.importorskip("transformers", reason="pip install 'transformers>=5'")
    save_folder(tmp_path / "m", TINY, random_weights(TINY, torch.float32, seed=4), torch.float32)
    convert_model(tmp_path / "m", tmp_path / "q", format, torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.arange(30)[None]).logits[0]
    ours = Transformer.from_state(TINY, load_weights(tmp_path / "q", TINY, torch.float32, format), format=format)
    torch.testing.assert_close(ours.logits(range(30)), expected.float(), rtol=1e-4, atol=1e-4)
    dense = Transformer.from_state(TINY, load_weights(tmp_path / "m", TINY, torch.float32))
    assert (dense.logits(range(30)) - expected).abs().max() > 1e-3  # it is quantized at all


WIDE: dict[str, Any] = {"intermediate_size": 96}
WINDOWED: dict[str, Any] = {**WIDE, "head_dim": 32, "sliding_window": 7, "query_pre_attn_scalar": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": WIDE, "qwen2 tied": {**WIDE, "tie_word_embeddings": True}, "qwen3": {**WIDE, "head_dim": 32},
    "gemma2": WINDOWED, "gemma3_text": {**WINDOWED, "num_hidden_layers": 7},
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("format", [INT4, INT8], ids=str)
def test_families_with_biases_and_norms(tmp_path: Path, name: str, format: WeightFormat) -> None:
    """Biases, norms of queries and keys, scaled embeddings, norms with 1 added. transformers has the same logits; not
    quantized, every tensor is the source's."""
    transformers = pytest.importorskip("transformers", reason="pip install 'transformers>=5'")
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    source, target, ids = tmp_path / "m", tmp_path / "q", draw_ids(24, seed=1)
    theirs = random_checkpoint(name.split()[0], FAMILIES[name])
    theirs.save_pretrained(source)
    spec = read_spec(source)
    found = convert_model(source, target, format, torch.float32)
    assert found["matrices"] == 7 * len(spec.layers)
    assert read_spec(target) == spec.model_copy(update={"name": "q"})
    converted = load_weights(target, spec, torch.float32, format)
    asked = Transformer.from_state(spec, load_weights(source, spec, torch.float32), format=format)
    assert same({name: each for name, each in asked.state_dict().items() if name in converted}, converted)
    read = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
    ours = Transformer.from_state(spec, converted, format=format)
    torch.testing.assert_close(ours.logits(ids), logits_of(read, ids), rtol=1e-4, atol=1e-4)
    assert (ours.logits(ids) - logits_of(theirs, ids)).abs().max() > 1e-3  # it is quantized at all
    convert_model(source, tmp_path / "dense", WeightFormat(), torch.float32)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    kept = again.state_dict()
    assert all(torch.equal(kept[key], each) for key, each in theirs.state_dict().items())


def test_a_mixture_is_written_dense(tmp_path: Path) -> None:
    """Its experts would stay dense beside quantized matrices, which transformers does not read."""
    transformers = pytest.importorskip("transformers", reason="pip install 'transformers>=5'")
    theirs = random_checkpoint("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32})
    theirs.save_pretrained(tmp_path / "m")
    with pytest.raises(WorkbenchError, match="is a mixture, whose experts stay dense.*write a GGUF file"):
        convert_model(tmp_path / "m", tmp_path / "q", INT4, torch.float32)
    assert not (tmp_path / "q").exists()
    convert_model(tmp_path / "m", tmp_path / "q", WeightFormat(), torch.float32)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32).state_dict()
    assert all(torch.equal(read[key], each) for key, each in theirs.state_dict().items())


def test_matrices_that_are_stored_transposed_are_not_quantized(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install 'transformers>=5'")
    random_checkpoint("gpt2", {"n_inner": 256}).save_pretrained(tmp_path / "m")
    with pytest.raises(WorkbenchError, match="c_attn.weight is stored transposed: quantized it cannot be read"):
        convert_model(tmp_path / "m", tmp_path / "q", INT8, torch.float32)
    assert list((tmp_path / "q").iterdir()) == []


@pytest.mark.parametrize("as_folder", [False, True])
def test_the_tokenizer_and_template_of_a_gguf_file_are_kept(tmp_path: Path, as_folder: bool) -> None:
    """Those of the demo, whose tokens the template names."""
    shutil.copytree(BUNDLED_MODELS["demo"], tmp_path / "hf")
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ eos_token }}{{ messages[0].content }} é")
    (tmp_path / "m").mkdir()
    file = tmp_path / "m" / "a.gguf"
    convert_to_gguf(tmp_path / "hf", file, "bf16", torch.bfloat16)
    convert_model(file.parent if as_folder else file, tmp_path / "q", WeightFormat(), torch.bfloat16)
    right, found = open_tokenizer(tmp_path / "hf"), read_tokenizer(tmp_path / "q")
    assert right is not None and found is not None
    text = "def fib(n):\n    return n  # 日本語 🙂 <|end|>"
    assert found.encode(text, special=True) == right.encode(text, special=True)
    assert found.special_token_ids == right.special_token_ids and found.bos_token_ids == right.bos_token_ids
    given, kept = open_chat_template(file), ChatTemplate.from_folder(tmp_path / "q")
    assert given is not None and kept is not None and (kept.text, kept.names) == (given.text, given.names)


def test_gguf_keeps_its_codes_in_memory_and_when_converted(tmp_path: Path) -> None:
    """As it is stored, which is INT4 in groups of 32, whatever order its rows have; also beside a dense embedding."""
    pytest.importorskip("gguf", reason="the writer of the files: pip install gguf")
    pytest.importorskip("transformers", reason="pip install 'transformers>=5'")
    from tests.model.formats.gguf_of_transformers import write_gguf

    sizes = {
        "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "head_dim": 64,
    }  # fmt: skip
    file = write_gguf(random_checkpoint("llama", sizes), tmp_path / "a.gguf", tmp_path / "hf", "Q4_0")
    spec, checkpoint = read_spec(file), open_checkpoint(file)
    wanted = wanted_parameters(checkpoint, spec)
    own, reasons = stored_format(checkpoint, wanted, spec.tie_word_embeddings)
    format = WeightFormat.parse("int4", "int4", 32)
    assert own == WeightFormat(format.blocks, format.blocks, embedding=format.blocks) and not reasons
    dense = Transformer.from_state(spec, load_weights(file, spec, torch.float32))
    assert not cost_of_widening(checkpoint, wanted, False, own, torch.float32, reasons)
    (said,) = cost_of_widening(checkpoint, wanted, False, format, torch.float32, reasons)  # the embedding
    assert said.startswith("GGUF Q4_0, 1 of 16 quantized tensors are widened to float32, ")
    for each in (own, format):
        kept = Transformer.from_state(spec, load_weights(file, spec, torch.float32, each), format=each)
        assert same(kept.dense_state(torch.float32), dense.dense_state(torch.float32))
    convert_model(file, tmp_path / "q", format, torch.float32)
    assert same(
        load_weights(tmp_path / "q", spec, torch.float32, format), load_weights(file, spec, torch.float32, format)
    )
