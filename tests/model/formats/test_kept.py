"""Quantized files stay in their bits in memory where a product multiplies from them; others are widened."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench
from compiled_kernels.linear.quantize import dequantize_int4, pack_int4, quantize_int4
from tests.model.formats.folders import TINY, write_quantized
from tests.model.formats.test_quantized_folders import PACKERS
from tests.model.test_weights import same
from tests.thorough import tries
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel, weight_format
from workbench.engine.runner import Runner
from workbench.model.hf.weights import load_weights, random_weights
from workbench.model.quantized import WeightFormat
from workbench.model.transformer import Transformer
from workbench.testing import packers
from workbench.testing.packers import Packer
from workbench.trace.events import Finished

# What a folder of each packer becomes in memory, or why it is widened.
KEPT = {
    "gptq 4 bits": WeightFormat("int4", "dense", 32), "gptq 3 bits": WeightFormat("int4", "dense", 32),
    "gptq 2 bits": WeightFormat("int4", "dense", 32), "gptq without g_idx": WeightFormat("int4", "dense", 32),
    "awq, symmetric": WeightFormat("int4", "dense", 32), "int4": WeightFormat("int4", "dense", 32),
    "int3": WeightFormat("int4", "dense", 32), "int8": WeightFormat("int8", "dense"),
    "bitsandbytes int8": WeightFormat("int8", "dense"),
}  # fmt: skip
WIDENED = {
    "gptq 8 bits": "a scale for 32 columns",
    "gptq with zeros": "codes with zeros",
    "gptq v2": "codes with zeros",
    "gptq in the order of activations": "zeros|order of activations",
    "gptq, one group": "matrices of the blocks differ",
    "int4 by row": "matrices of the blocks differ",
    "awq": "codes with zeros",
    "int4 with zeros": "codes with zeros",
    "int8 packed": "codes with zeros",
    "fp8 by row": "from FP8",
    "fp8, one scale": "from FP8",
    "fp8 by block": "from FP8",
    "fp8, DeepSeek's": "from FP8",
    "mxfp4, packed": "from MXFP4",
    "nf4": "from NF4",
    "nf4, nested": "from NF4",
    "fp4": "from FP4",
}


def load(folder: Path, lines: list[str], **options: object) -> Transformer:
    config = EngineConfig.build(folder, backend="eager", **{"dtype": "float32", **options})
    return LoadedModel.load(config, lines.append).transformer


def pack(folder: Path, packer: Packer, **options: object) -> Path:
    """Write the packed folder and its dense one, each with a tokenizer."""
    dense = write_quantized(folder, packer, **options)  # type: ignore[arg-type]
    for each in (folder, dense):
        shutil.copy(Path(workbench.__file__).parent / "demo" / "bytes" / "tokenizer.json", each)
    return dense


def test_every_format_has_its_row() -> None:
    assert not KEPT.keys() & WIDENED.keys() and KEPT.keys() | WIDENED.keys() == PACKERS.keys()


@pytest.mark.parametrize("name", PACKERS)
def test_a_loaded_model_is_the_dense_one(tmp_path: Path, name: str) -> None:
    """Codes and scales in memory are the file's own: their products in float32 are the dense matrices, bit for bit."""
    dense, lines = pack(tmp_path / "m", PACKERS[name]), []
    model = load(tmp_path / "m", lines)
    expected = load(dense, [])
    assert model.format == KEPT.get(name, WeightFormat())
    found, right = (each.dense_state(torch.float32) for each in (model, expected))
    if name == "bitsandbytes int8":  # its own order of products rounds once more
        for key in found:
            torch.testing.assert_close(found[key], right[key], rtol=2e-7, atol=0)
    else:
        assert same(found, right)
    torch.testing.assert_close(model.logits(range(30)), expected.logits(range(30)), rtol=1e-4, atol=1e-4)
    said = [line for line in lines if "widened" in line]
    assert len(said) == (name in WIDENED)
    for line in said:
        assert re.search(f"widened to float32, 0.3 MB for 0.[01] MB in the files .*{WIDENED[name]}", line), line
    if name in KEPT:
        bytes_of = {part.weight.nbytes for part in model.modules() if hasattr(part, "quant_group")}
        assert model.weight_bytes < expected.weight_bytes / 2 and bytes_of


def test_settings_outrank_the_files(tmp_path: Path) -> None:
    pack(tmp_path / "m", packers.pack_quantized)
    lines: list[str] = []
    assert load(tmp_path / "m", lines, weights="dense").format == WeightFormat()
    assert len(lines) == 1 and "(weights: dense is set)" in lines[0]
    assert load(tmp_path / "m", lines, weights="int8").format == WeightFormat("int8", "int8")
    assert "and quantized again as int8" in lines[1]
    assert load(tmp_path / "m", [], head_weights="int8").format == WeightFormat("int4", "int8", 32)
    model, plain = (load(tmp_path / "m", [], **each) for each in ({"weights": "int4", "weight_group": 32}, {}))
    blocks = [{name: each for name, each in m.state_dict().items() if "blocks" in name} for m in (model, plain)]
    assert same(*blocks)  # the files' own codes, not new ones


def test_a_dense_layer_widens_the_others(tmp_path: Path) -> None:
    pack(tmp_path / "m", packers.pack_quantized, skip=("layers.1.mlp.down",))
    lines: list[str] = []
    assert load(tmp_path / "m", lines).format == WeightFormat()
    assert "matrices of the blocks differ" in lines[0]


def test_a_part_of_a_fused_matrix_is_dense(tmp_path: Path) -> None:
    dense = pack(tmp_path / "m", packers.pack_quantized, skip=("k_proj",))
    lines: list[str] = []
    assert same(*(load(each, lines).dense_state(torch.float32) for each in (tmp_path / "m", dense)))
    assert "k_proj.weight is dense beside quantized ones" in lines[0]


def test_scales_that_float16_cannot_hold_are_widened(tmp_path: Path) -> None:
    tiny = partial(packers.pack_quantized, dtype=torch.float32)
    dense, lines = pack(tmp_path / "m", tiny), []
    model = load(tmp_path / "m", lines)
    assert model.format == WeightFormat() and "scales are not exact in float16" in lines[0]
    assert same(model.dense_state(torch.float32), load(dense, []).dense_state(torch.float32))


def test_the_memory_of_a_folder_is_of_its_own_format(tmp_path: Path) -> None:
    pack(tmp_path / "m", packers.pack_quantized)
    config = EngineConfig.build(tmp_path / "m")
    assert weight_format(config.model) == WeightFormat("int4", "dense", 32)
    assert weight_format(EngineConfig.build("demo").model) == WeightFormat()


@pytest.mark.parametrize("backend", ["eager", "inductor", "mlir"])
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_every_backend_generates_what_the_dense_model_does(tmp_path: Path, name: str, backend: str) -> None:
    from compiled_kernels import Backend
    from compiled_kernels.backends import backend_problems

    if problem := backend_problems()[Backend(backend)]:
        pytest.skip(f"{backend}: {problem}")
    dense = pack(tmp_path / "m", PACKERS[name], spec=TINY.model_copy(update={"vocab_size": 272}))
    texts = []
    for folder, chosen in ((tmp_path / "m", backend), (dense, "eager")):
        runner = Runner(EngineConfig.build(folder, backend=chosen, dtype="float32"), report=lambda line: None)
        events = runner.stream("def f(n):", max_tokens=12, temperature=0)
        (end,) = [event for event in events if isinstance(event, Finished)]
        assert len(end.token_ids) == 12, end
        texts.append(end.token_ids)
    assert texts[0] == texts[1]


@settings(max_examples=tries(40))
@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from([2, 6, 32, 64]), st.integers(0, 2**30))
def test_packed_codes_are_those_of_the_quantizer(rows: int, groups: int, group: int, seed: int) -> None:
    weight = torch.randn(rows, groups * group, generator=torch.Generator().manual_seed(seed))
    packed, scales = quantize_int4(weight, group)
    ones = torch.ones_like(scales)
    codes = dequantize_int4(packed, ones).to(torch.int8)
    assert torch.equal(pack_int4(codes, group), packed)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_positions_and_norms_by_head_stay_dense(weights: str) -> None:
    """They have two axes and are no products."""
    spec = TINY.model_copy(update={"learned_positions": 2})
    state = random_weights(spec, torch.float32)
    model = Transformer.from_state(spec, dict(state), format=WeightFormat.parse(weights, quant_group=32))
    assert model.logits([1, 2]).isfinite().all()
    assert torch.equal(model.dense_state(torch.float32)["positions.weight"], state["positions.weight"])


def test_load_weights_is_dense_by_default(tmp_path: Path) -> None:
    pack(tmp_path / "m", packers.pack_quantized)
    assert not [name for name in load_weights(tmp_path / "m", TINY, torch.float32) if name.endswith("scales")]
