"""Experts of quantized files stay in their bits in memory; settings quantize those of dense files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import workbench
from compiled_kernels import Backend, backend_problems
from compiled_kernels.linear.matrix_format import INT8_MATRIX, MatrixFormat
from tests.model.families import NEEDS_TRANSFORMERS, read_model
from tests.model.formats.folders import same, write_gpt_oss
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel, weight_format, weight_storage
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.model.formats.gguf.blocks import BLOCK_TYPES
from workbench.model.formats.open import open_checkpoint
from workbench.model.memory import weight_bytes
from workbench.model.quantized import WeightFormat, matrix_format
from workbench.model.transformer import Transformer
from workbench.testing import packers
from workbench.testing.family_checkpoints import random_checkpoint
from workbench.testing.packers import pack_folder
from workbench.trace.events import Finished

pytestmark = NEEDS_TRANSFORMERS
INT4, MXFP4 = matrix_format("int4", 32), MatrixFormat.named("mxfp4")
HERE = [each for each in (Backend.EAGER, Backend.INDUCTOR, Backend.MLIR) if backend_problems()[each] is None]
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64, "num_experts": 5,
         "num_experts_per_tok": 2, "vocab_size": 266}  # fmt: skip


def load(folder: Path, lines: list[str], backend: str = "eager", **options: object) -> Transformer:
    config = EngineConfig.build(folder, backend=backend, **{"dtype": "float32", **options})
    return LoadedModel.load(config, lines.append).transformer


def add_tokenizer(*folders: Path) -> None:
    for folder in folders:
        shutil.copy(Path(workbench.__file__).parent / "demo" / "bytes" / "tokenizer.json", folder)


def widened(pairs: Tensor, scales: Tensor) -> Tensor:
    values = torch.tensor(packers.E2M1)[torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).int()]
    numbers = values.unflatten(-1, (-1, 32)) * 2.0 ** (scales.float() - 127)[..., None]
    return numbers.flatten(-2).transpose(1, 2).bfloat16().contiguous()


def gpt_oss(folder: Path) -> Path:
    dense = write_gpt_oss(folder, widened)
    add_tokenizer(folder, dense)
    return dense


def parameter_bytes(model: Transformer) -> int:
    return sum(each.nbytes for each in model.parameters())


@pytest.mark.parametrize("backend", HERE)
def test_gpt_oss_keeps_mxfp4(tmp_path: Path, backend: Backend) -> None:
    """Gate and up are woven in the file. The widened model's numbers are the codes', bit for bit."""
    dense, lines = gpt_oss(tmp_path / "m"), []
    model, expected = load(tmp_path / "m", lines, str(backend)), load(dense, lines)
    assert model.format == WeightFormat(experts=MXFP4) and not lines
    assert same(model.dense_state(torch.float32), expected.dense_state(torch.float32))
    assert parameter_bytes(model) == weight_bytes(model.spec, 4, model.format)
    assert weight_format(EngineConfig.build(tmp_path / "m").model) == model.format
    experts = 2 * 5 * (192 * 64 + 64 * 96)  # numbers of both layers' experts
    assert parameter_bytes(expected) - parameter_bytes(model) == experts * 4 - experts * 17 // 32
    torch.testing.assert_close(model.logits(range(40)), expected.logits(range(40)), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", HERE)
def test_gpt_oss_generates_what_the_widened_model_does(tmp_path: Path, backend: Backend) -> None:
    dense, texts = gpt_oss(tmp_path / "m"), []
    for folder, chosen in ((tmp_path / "m", str(backend)), (dense, "eager")):
        runner = Runner(EngineConfig.build(folder, backend=chosen, dtype="float32"), report=lambda line: None)
        events = runner.stream("def f(n):", max_tokens=12, temperature=0)
        (end,) = [event for event in events if isinstance(event, Finished)]
        texts.append(end.token_ids)
    assert len(texts[0]) == 12 and texts[0] == texts[1]


PACKED = {
    "int4": (packers.pack_quantized, WeightFormat(INT4, experts=INT4)),
    "int8": (packers.int_quantized, WeightFormat(INT8_MATRIX, experts=INT8_MATRIX)),
    "gptq": (packers.gptq, WeightFormat(INT4, experts=INT4)),
    "mxfp4": (packers.mxfp4_pack, WeightFormat(MXFP4, experts=MXFP4)),
}


@pytest.mark.parametrize("name", PACKED)
def test_experts_of_packed_folders_stay_packed(tmp_path: Path, name: str) -> None:
    """compressed-tensors and GPTQ hold each expert's matrices apart."""
    pack, format = PACKED[name]
    random_checkpoint("qwen3_moe", SIZES).save_pretrained(tmp_path / "plain")
    dense = pack_folder(tmp_path / "plain", tmp_path / "m", pack)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    save_file(
        {each: tensor.float() for each, tensor in (plain | dense).items()}, tmp_path / "plain" / "model.safetensors"
    )
    add_tokenizer(tmp_path / "m", tmp_path / "plain")
    lines: list[str] = []
    model, expected = load(tmp_path / "m", lines), load(tmp_path / "plain", [])
    assert model.format.of_experts == format.of_experts
    assert same(model.dense_state(torch.float32), expected.dense_state(torch.float32))
    assert not any("expert" in line.removeprefix(str(tmp_path)) for line in lines)
    assert parameter_bytes(model) == weight_bytes(model.spec, 4, model.format)
    torch.testing.assert_close(model.logits(range(30)), expected.logits(range(30)), rtol=1e-4, atol=1e-4)


LLAMA = {"vocab_size": 266, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4,
         "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 2}  # fmt: skip
MIXTRAL = LLAMA | {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}
LIKE_Q4_K_M = {"ffn_down": "Q6_K", "attn_v": "Q6_K"}
EVERY_PART = {"attn_k": "Q8_0", "attn_v": "Q6_K", "ffn_up": "Q5_0", "ffn_down": "F16", "token_embd": "Q3_K"}
OF_GGUF = [("mixtral", type.name, LIKE_Q4_K_M) for type in BLOCK_TYPES.values() if type.format is not None]


@pytest.mark.parametrize(("family", "kind", "own"), [*OF_GGUF, ("llama", "Q4_K", EVERY_PART)], ids=str)
def test_every_matrix_of_gguf_stays_packed(tmp_path: Path, family: str, kind: str, own: dict[str, str]) -> None:
    """Its bits are in another order, its codes and scales are ours; nothing is widened, and in panels, where threads
    lay parts of fused matrices out apart, it has the same numbers."""
    writing = pytest.importorskip("tests.model.formats.gguf_of_transformers", reason="gguf is not installed")
    theirs = random_checkpoint(family, MIXTRAL if family == "mixtral" else LLAMA)
    stored, widened = (
        writing.write_gguf(theirs, tmp_path / f"{each}.gguf", tmp_path / "hf", kind, widened=each, own=own)
        for each in (False, True)
    )
    found = weight_storage(EngineConfig.build(stored, dtype="float32").model)
    assert not found["widened"] and found["bytes"] == found["file_bytes"]
    model, expected = load(stored, []), read_model(widened).dense_state(torch.float32)
    packed = sum(each.nbytes for each in open_checkpoint(stored).tensors.values() if each.dtype != "F32")
    assert found["bytes"] == packed and same(model.dense_state(torch.float32), expected)
    assert model.use_code_panels(in_place=True) and same(model.dense_state(torch.float32), expected)


def test_float16_experts_are_cast_with_a_line(tmp_path: Path) -> None:
    """No product of experts has both types; a model of float16 has nothing to cast."""
    writing = pytest.importorskip("tests.model.formats.gguf_of_transformers", reason="gguf is not installed")
    theirs, own = random_checkpoint("mixtral", MIXTRAL), {"ffn_down": "F16"}
    path = writing.write_gguf(theirs, tmp_path / "a.gguf", tmp_path / "hf", "Q8_0", own=own)
    cost = "GGUF F16, F32, Q8_0, 6 of 6 float16 tensors are cast to float32, 1.5 MiB for 768 KiB in the files"
    reason = "(blk.0.ffn_down_exps.0.weight and 5 more: no kernel for experts reads float16 together with another type)"
    for dtype, lines in {"float16": [], "float32": [f"{cost} {reason}"]}.items():
        assert weight_storage(EngineConfig.build(path, dtype=dtype).model)["widened"] == lines


def test_settings_quantize_experts(tmp_path: Path) -> None:
    """`weights` is of the experts too, unless `expert_weights` says otherwise; a router stays dense."""
    random_checkpoint("qwen3_moe", SIZES).save_pretrained(tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    dense = load(tmp_path / "m", [])
    name = "blocks.0.feedforward.gate_up"
    exact = dense.state_dict()[name]
    sizes = {}
    for weights, experts in (("int4", None), ("int4", "dense"), ("dense", "int4"), ("int8", None), ("auto", "int8")):
        model = load(tmp_path / "m", [], weight_group=16, weights=weights, expert_weights=experts)
        kind = model.format.of_experts.codes
        assert kind == (experts or weights)
        stored = model.dense_state(torch.float32)
        away = float((stored[name] - exact).norm() / exact.norm())
        assert (away == 0) if kind == "dense" else 0 < away < (0.01 if kind == "int8" else 0.1)
        widened = Transformer.from_state(model.spec, stored)
        torch.testing.assert_close(model.logits(range(30)), widened.logits(range(30)), rtol=1e-4, atol=1e-4)
        assert model.blocks[0].feedforward.router.weight.dtype == torch.float32  # type: ignore[union-attr]
        assert parameter_bytes(model) == weight_bytes(model.spec, 4, model.format)
        sizes[weights, experts] = parameter_bytes(model)
    assert sizes["int4", None] < min(sizes["int4", "dense"], sizes["dense", "int4"]) < parameter_bytes(dense)


def test_groups_must_divide_experts(tmp_path: Path) -> None:
    random_checkpoint("qwen3_moe", SIZES | {"moe_intermediate_size": 48}).save_pretrained(tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    with pytest.raises(WorkbenchError, match="down: groups of 32 in stacks of experts do not divide 48 columns"):
        load(tmp_path / "m", [], weights="int4", weight_group=32)
    assert load(tmp_path / "m", [], weights="int4", weight_group=32, expert_weights="dense")


def test_a_stack_that_is_stored_in_two_ways_is_widened(tmp_path: Path) -> None:
    random_checkpoint("qwen3_moe", SIZES).save_pretrained(tmp_path / "plain")
    pack_folder(tmp_path / "plain", tmp_path / "m", packers.pack_quantized, skip=("experts.3.down_proj",))
    add_tokenizer(tmp_path / "m")
    lines: list[str] = []
    format = load(tmp_path / "m", lines).format
    for part, dense in (("gate_up", False), ("down", True)):
        assert format.is_dense(f"blocks.0.feedforward.{part}", 3) == dense
    assert any("several formats" in line for line in lines)
