"""GGUF files of our own: rounded as the `gguf` package rounds, read by it and by us as what was written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.command_line import answer
from tests.model.families import GGUF_CASES, WIDE, assert_equal, draw_ids, logits_of, read_model
from tests.prompt.vocabularies import trained_pieces
from tests.thorough import tries
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.errors import WorkbenchError
from workbench.model.formats.gguf import write as gguf_write
from workbench.model.formats.gguf.blocks import BlockType
from workbench.model.formats.gguf.file import GGUFArray, GGUFFile
from workbench.model.formats.gguf.write import TYPES, WRITTEN_TYPES, WrittenTensor, quantize_blocks, write_gguf
from workbench.model.formats.open import open_checkpoint
from workbench.model.formats.texts import open_chat_template, open_tokenizer
from workbench.model.hf.convert_gguf import convert_to_gguf
from workbench.model.hf.families import read_spec
from workbench.model.hf.weights import load_weights
from workbench.oracle import naive
from workbench.testing.family_checkpoints import random_checkpoint

gguf = pytest.importorskip("gguf", reason="the yardstick: pip install gguf")


@pytest.mark.parametrize("kind", WRITTEN_TYPES)
@settings(max_examples=tries(100), deadline=None)
@given(data=st.data())
def test_blocks_are_rounded_as_the_package_does(kind: str, data: st.DataObject) -> None:
    """Halves, zeros, equal and tiny numbers included."""
    number, type = TYPES[kind]
    values = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, 0.5, -0.5, 127.0, 63.5, 1e-30])
    halves = st.lists(st.integers(-254, 254), min_size=62, max_size=62).map(  # of a scale that is exactly 1
        lambda each: [127.0, *(number / 2 for number in each), -127.0]
    )
    numbers = np.array(data.draw(st.lists(values, min_size=64, max_size=64) | halves), np.float32)
    with np.errstate(all="ignore"):
        right = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType(number))
    found = quantize_blocks(type, torch.from_numpy(numbers.copy()))
    assert found.numpy().tobytes() == right.tobytes()


def test_metadata_and_tensors_are_read_by_the_package(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {
        "general.architecture": "llama", "a.yes": True, "a.count": 7, "a.less": -7, "a.share": 0.5, "a.text": "Grüße",
        "a.words": ["x", "▁y", ""], "a.flags": [True, False], "a.numbers": [1, -2], "a.counts": [1, 2],
        "a.none": [],
    }  # fmt: skip
    one, two = torch.randn(3, 64), torch.randn(5)
    tensors = [
        WrittenTensor("one.weight", (3, 64), TYPES["Q8_0"][1], lambda: one),
        WrittenTensor("two", (5,), TYPES["F32"][1], lambda: two),
    ]
    write_gguf(tmp_path / "a.gguf", metadata, tensors)
    theirs = gguf.GGUFReader(tmp_path / "a.gguf")
    assert [each.name for each in theirs.tensors] == ["one.weight", "two"]
    assert (
        theirs.tensors[0].data.tobytes() == gguf.quants.quantize(one.numpy(), gguf.GGMLQuantizationType.Q8_0).tobytes()
    )
    signed = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]  # llama.cpp takes whole numbers with a sign alone
    assert theirs.fields["a.numbers"].types == theirs.fields["a.counts"].types == signed
    assert [str(theirs.fields["a.words"].contents(index)) for index in range(3)] == ["x", "▁y", ""]
    file = GGUFFile(tmp_path / "a.gguf")
    read = {key: value.values() if isinstance(value, GGUFArray) else value for key, value in file.metadata.items()}
    assert read == metadata and torch.equal(file.read("two"), two)


@pytest.mark.parametrize("family", GGUF_CASES)
def test_float32_of_a_folder_is_the_same_model(tmp_path: Path, family: str) -> None:
    """Logits are transformers', and the numbers those of the folder, bit for bit but for norms with 1 added."""
    theirs = random_checkpoint(family, GGUF_CASES[family][0])
    theirs.save_pretrained(tmp_path / "hf")
    convert_to_gguf(tmp_path / "hf", tmp_path / "a.gguf", "f32", torch.float32)
    ids = draw_ids(24, seed=1)
    assert_equal(naive.logits(read_model(tmp_path / "a.gguf"), ids), logits_of(theirs, ids))
    spec = read_spec(tmp_path / "hf")
    right, found = (load_weights(tmp_path / name, spec, torch.float32) for name in ("hf", "a.gguf"))
    for name, tensor in right.items():
        # A weight w is stored as w + 1, which is below 4: half a unit of its last place.
        bound = 2.0**-23 if "norm" in name and spec.norm.offset else 0
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=bound)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f16", "bf16"])
def test_the_command_writes_each_type(tmp_path: Path, kind: str) -> None:
    random_checkpoint("llama", WIDE).save_pretrained(tmp_path / "hf")
    target = tmp_path / "a.gguf"
    found = answer(f"model convert --to gguf --weights {kind}", tmp_path / "hf", target)
    assert found["weights"] == kind.upper() and found["bytes"] == target.stat().st_size
    whole = {each.name: each for each in gguf.GGUFReader(target).tensors}
    assert whole["blk.0.ffn_up.weight"].tensor_type.name == kind.upper()
    assert whole["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    dense = load_weights(tmp_path / "hf", read_spec(tmp_path / "hf"), torch.float32)
    stored = open_checkpoint(target).tensors["blk.0.ffn_up.weight"].read().float()
    largest = stored.abs().max().item()
    error = (stored - dense["blocks.0.feedforward.gate_up.weight"][256:]).abs().max().item()
    assert error <= largest * {"q8_0": 0.005, "q4_0": 0.1, "f16": 1e-3, "bf16": 4e-3}[kind]


def test_a_gguf_file_again_keeps_what_it_is(tmp_path: Path) -> None:
    """Numbers of float16, and the tokenizer's keys."""
    demo = BUNDLED_MODELS["demo"]
    convert_to_gguf(demo, tmp_path / "a.gguf", "bf16", torch.bfloat16)
    convert_to_gguf(tmp_path / "a.gguf", tmp_path / "b.gguf", "bf16", torch.bfloat16)
    first, again = open_checkpoint(tmp_path / "a.gguf"), open_checkpoint(tmp_path / "b.gguf")
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor.read(), again.tensors[name].read()), name
    right, found = open_tokenizer(demo), open_tokenizer(tmp_path / "b.gguf")
    assert right is not None and found is not None
    text = "def fib(n):\n    return n  # 日本語 🙂 <|end|>"
    assert found.encode(text) == right.encode(text) and found.special_token_ids == right.special_token_ids
    assert read_spec(tmp_path / "b.gguf").eos_token_ids == read_spec(demo).eos_token_ids


@pytest.mark.parametrize(
    ("family", "changes", "arguments", "message"),
    [
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 64}, {}, "opt cannot be written as GGUF"),
        ("phi", {"qk_layernorm": True}, {}, "cannot express this model"),
        ("llama", {}, {"weights": "q4_k"}, "--weights q4_k: supported for GGUF: f32, f16, bf16, q8_0, q4_0"),
        ("llama", {}, {"target": "a.bin"}, "must be called NAME.gguf"),
    ],
)
def test_what_is_refused_leaves_no_file(
    tmp_path: Path, family: str, changes: dict[str, Any], arguments: dict[str, str], message: str
) -> None:
    random_checkpoint(family, changes).save_pretrained(tmp_path / "hf")
    target = tmp_path / arguments.get("target", "a.gguf")
    with pytest.raises(WorkbenchError, match=message):
        convert_to_gguf(tmp_path / "hf", target, arguments.get("weights", "f32"), torch.float32)
    assert not target.exists()


def test_what_gguf_cannot_express_is_refused_before_matrices_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counted(type: BlockType, numbers: torch.Tensor) -> torch.Tensor:
        sizes.append(numbers.numel())
        return quantize_blocks(type, numbers)

    monkeypatch.setattr(gguf_write, "quantize_blocks", counted)
    random_checkpoint("phi", {"qk_layernorm": True}).save_pretrained(tmp_path / "hf")
    with pytest.raises(WorkbenchError, match="cannot express this model"):
        convert_to_gguf(tmp_path / "hf", tmp_path / "a.gguf", "f32", torch.float32)
    assert 0 < max(sizes) < 1000 and [each.name for each in tmp_path.iterdir()] == ["hf"]


def test_what_an_outline_says_is_what_the_file_says(tmp_path: Path) -> None:
    tensors = [WrittenTensor(name, (3, 5), TYPES["F32"][1], lambda: torch.ones(3, 5)) for name in "ab"]
    write_gguf(tmp_path / "whole", {"a": 1}, tensors)
    write_gguf(tmp_path / "outline", {"a": 1}, tensors, matrices=False)
    whole, outline = GGUFFile(tmp_path / "whole"), GGUFFile(tmp_path / "outline")
    assert whole.tensors == outline.tensors and whole.metadata == outline.metadata
    assert len(whole.bytes) == len(outline.bytes) and not outline.read("b").any()


def _folder(path: Path, **changes: Any) -> Path:
    """Write the demo without its tokenizer.json."""
    shutil.copytree(BUNDLED_MODELS["demo"], path, ignore=shutil.ignore_patterns("tokenizer*"))
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_the_template_in_the_config_and_a_sentencepiece_model_are_written(tmp_path: Path) -> None:
    """With the tokens that the template names, the end token of a text first among the model's."""
    folder = _folder(tmp_path / "m", eos_token_id=[1, 2])
    (folder / "tokenizer.model").write_bytes(trained_pieces("bpe as Llama"))
    config = {"chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": {"content": "</s>"}}))
    found = convert_to_gguf(folder, tmp_path / "a.gguf", "bf16", torch.bfloat16)
    assert found["tokenizer"] == "vocabulary of llama.cpp (sentencepiece)"
    template, tokenizer = open_chat_template(tmp_path / "a.gguf"), open_tokenizer(tmp_path / "a.gguf")
    right = open_tokenizer(folder)
    assert template is not None and tokenizer is not None and right is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi</s>"
    assert tokenizer.encode("Hello, wörld 🙂") == right.encode("Hello, wörld 🙂")
    assert tokenizer.bos_token_ids == right.bos_token_ids == (1,)
    assert GGUFFile(tmp_path / "a.gguf").metadata["tokenizer.ggml.bos_token_id"] == 1
    assert sorted(read_spec(tmp_path / "a.gguf").eos_token_ids) == [1, 2]


def test_more_end_tokens_than_gguf_has_keys_for_are_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", eos_token_id=[1, 2, 3, 4])
    with pytest.raises(WorkbenchError, match="eos_token_id has 4 ids; GGUF has keys for 3"):
        convert_to_gguf(folder, tmp_path / "a.gguf", "bf16", torch.bfloat16)
