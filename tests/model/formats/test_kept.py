"""Quantized files stay in their bits in memory where a product multiplies from them; others are widened."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench
from compiled_kernels.linear.matrix_format import MatrixFormat
from compiled_kernels.linear.quantize import dequantize_matrix
from tests.model.formats.folders import PACKERS, TINY, same, write_quantized
from tests.thorough import tries
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel, weight_format
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.model.formats.checkpoint import Checkpoint, QuantizedMatrix, StoredTensor
from workbench.model.hf.fields import ConfigFields
from workbench.model.hf.kept import KeptMatrix, kept_matrix
from workbench.model.hf.weights import load_weights, random_weights
from workbench.model.linear import Linear
from workbench.model.memory import weight_bytes
from workbench.model.parameters import StoredParameter, StoredPart
from workbench.model.quantized import WeightFormat, quantize
from workbench.model.spec import NormSpec
from workbench.model.transformer import Transformer
from workbench.testing import packers
from workbench.testing.packers import Packer
from workbench.trace.events import Finished

INT4, BY_64, BY_128 = (WeightFormat(MatrixFormat("int4", group, torch.float16)) for group in (32, 64, 128))
BY_ROW = replace(
    BY_64, own=tuple((f"blocks.{i}.feedforward.down.weight", ((64, BY_128.blocks),)) for i in range(len(TINY.layers)))
)
ZEROS = WeightFormat(MatrixFormat("int4", 32, torch.float16, torch.float32))
FP8, FP8_BLOCKS = WeightFormat(MatrixFormat("fp8")), WeightFormat(MatrixFormat("fp8", 40))
# What a folder of each packer becomes in memory, or why it is widened.
KEPT = {
    "gptq 4 bits": INT4, "gptq 3 bits": INT4, "gptq 2 bits": INT4, "gptq without g_idx": INT4, "awq, symmetric": INT4,
    "int4": INT4, "int3": INT4, "gptq, one group": BY_ROW, "int4 by row": BY_ROW,
    "gptq with zeros": ZEROS, "gptq v2": ZEROS, "awq": ZEROS, "int4 with zeros": ZEROS,
    "int8": WeightFormat.parse("int8", "dense"), "bitsandbytes int8": WeightFormat.parse("int8", "dense"),
    "gptq 8 bits": WeightFormat(MatrixFormat("int8", 32, torch.float16)),
    "int8 packed": WeightFormat(MatrixFormat("int8", 32, torch.float16, torch.float32)),
    "mxfp4, packed": WeightFormat(MatrixFormat.named("mxfp4")),
    "fp8 by row": FP8, "fp8, one scale": FP8, "fp8 by block": FP8_BLOCKS, "fp8, DeepSeek's": FP8_BLOCKS,
}  # fmt: skip
WIDENED = {
    "gptq in the order of activations": "order of activations",
    "nf4": "no kernel multiplies NF4",
    "nf4, nested": "no kernel multiplies NF4",
    "fp4": "no kernel multiplies FP4",
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
        assert re.search(rf"widened to float32, [23]\d\d KiB for [\d.]+ KiB in the files .*{WIDENED[name]}", line), line
    if name in KEPT:
        bytes_of = {part.weight.nbytes for part in model.modules() if isinstance(part, Linear)}
        assert model.weight_bytes < expected.weight_bytes / 2 and bytes_of


def test_settings_outrank_the_files(tmp_path: Path) -> None:
    pack(tmp_path / "m", packers.pack_quantized)
    lines: list[str] = []
    assert load(tmp_path / "m", lines, weights="dense").format == WeightFormat()
    assert len(lines) == 1 and "(weights: dense is set)" in lines[0]
    assert load(tmp_path / "m", lines, weights="int8").format == WeightFormat.parse("int8", "int8")
    assert "and quantized again as int8" in lines[1]
    assert load(tmp_path / "m", [], head_weights="int8").format == WeightFormat.parse("int4", "int8", 32)
    model, plain = (load(tmp_path / "m", [], **each) for each in ({"weights": "int4", "weight_group": 32}, {}))
    blocks = [{name: each for name, each in m.state_dict().items() if "blocks" in name} for m in (model, plain)]
    assert same(*blocks)  # the files' own codes, not new ones


@pytest.mark.parametrize("skip", ["layers.1.mlp.down", "k_proj", "gate_proj"])
def test_a_dense_matrix_leaves_others_as_they_are(tmp_path: Path, skip: str) -> None:
    """A matrix of its own, or a part of a fused one: rows of qkv and gate_up are then products of their own."""
    dense, lines = pack(tmp_path / "m", packers.pack_quantized, skip=(skip,)), []
    model, right = load(tmp_path / "m", lines), load(dense, [])
    assert model.format.blocks == INT4.blocks and not lines
    name = {"k_proj": "attention.qkv", "gate_proj": "feedforward.gate_up"}.get(skip, "feedforward.down")
    expected = [(name, 1)] if skip.startswith("layers") else [(name, i) for i in range(len(TINY.layers))]
    assert {each for each, _ in model.format.own} == {f"blocks.{i}.{part}.weight" for part, i in expected}
    assert same(*(each.dense_state(torch.float32) for each in (model, right)))
    torch.testing.assert_close(model.logits(range(30)), right.logits(range(30)), rtol=1e-4, atol=1e-4)
    stored = sum(parameter.nbytes for parameter in model.parameters())
    assert weight_bytes(model.spec, 4, model.format) == stored


@pytest.mark.parametrize("zero", [False, True])
def test_scales_that_float16_cannot_hold_stay_float32(tmp_path: Path, zero: bool) -> None:
    """Beside zeros they are widened: a zero times such a scale is not exact in float32."""
    dense, lines = pack(tmp_path / "m", partial(packers.pack_quantized, dtype=torch.float32, zero=zero)), []
    model = load(tmp_path / "m", lines)
    assert model.format == (WeightFormat() if zero else WeightFormat(MatrixFormat("int4", 32)))
    assert bool(lines) == zero and (not zero or "its zeros times its float32 scales are not exact" in lines[0])
    assert same(model.dense_state(torch.float32), load(dense, []).dense_state(torch.float32))


def test_the_memory_of_a_folder_is_of_its_own_format(tmp_path: Path) -> None:
    pack(tmp_path / "m", packers.pack_quantized)
    config = EngineConfig.build(tmp_path / "m")
    assert weight_format(config.model) == WeightFormat.parse("int4", "dense", 32)
    assert weight_format(EngineConfig.build("demo").model) == WeightFormat()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", ["eager", "inductor", "mlir"])
@pytest.mark.parametrize("name", ["int4", "int8", "awq", "gptq 8 bits", "fp8 by block"])
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


@st.composite
def matrices(draw: st.DrawFn) -> QuantizedMatrix:
    """Random codes, scales by group of columns (the last of which may be partial) and rows, zeros or minima."""
    kind = draw(st.sampled_from(["int8", "int4", "int3", "fp8"]))
    whole = kind in ("int8", "fp8")
    groups = [2, 16, 48, 256, 1 << 16] if whole else [8, 16, 48, 96]
    rows, group = draw(st.integers(1, 9)), draw(st.sampled_from(groups))
    columns = draw(st.sampled_from([1, 3, 40, 96, 300])) if whole else 96
    own_rows = draw(st.sampled_from([1, 1, 4, 128]))
    make = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    shape = -(-rows // own_rows), -(-columns // group)
    low, high = {"int8": (-128, 128), "int4": (-8, 8), "int3": (-4, 4), "fp8": (-400, 400)}[kind]
    codes = torch.randint(low, high, (rows, columns), generator=make)
    codes = codes.float().to(torch.float8_e4m3fn) if kind == "fp8" else codes.to(torch.int8)
    scales = torch.randn(shape, generator=make).to(draw(st.sampled_from([torch.float16, torch.bfloat16])))
    scales[0, 0] = draw(st.sampled_from([0.0, 1.0, 2.0**-24]))
    added = draw(st.sampled_from(["", "zeros", "minima"])) if kind in ("int8", "int4") else ""
    zeros = torch.randint(low, high, shape, generator=make).short() if added == "zeros" else None
    minima = torch.randn(shape, generator=make).half() if added == "minima" else None
    codes = codes + 8 if kind == "int4" and added == "minima" else codes
    return QuantizedMatrix(kind, lambda: codes, scales, group, own_rows, zeros=zeros, minima=minima)  # type: ignore[arg-type]


def kept_of(matrix: QuantizedMatrix) -> KeptMatrix:
    return kept_in(Held(Path("m"), "Q", tuple(matrix.codes().shape), 0, matrix))


def kept_in(stored: StoredTensor) -> KeptMatrix:
    part = StoredPart("x", stored.shape)
    return kept_matrix(StoredParameter((part,)), Checkpoint(Path("m"), ConfigFields({}, "m"), {"x": stored}))


@dataclass(frozen=True)
class Held(StoredTensor):
    matrix: QuantizedMatrix

    def read(self) -> torch.Tensor:
        return self.matrix.dequantize()

    def quantized(self) -> QuantizedMatrix:
        return self.matrix


@dataclass(frozen=True)
class InWords(StoredTensor):
    beside: dict[str, torch.Tensor]

    def read(self) -> torch.Tensor:
        raise NotImplementedError("it stays in words")

    def own_format(self) -> MatrixFormat:
        return MatrixFormat.named("q5_1")

    def fill(self, stored: Sequence[torch.Tensor]) -> None:
        for out, each in zip(stored[1:], self.beside.values(), strict=True):
            out.copy_(each)


@settings(max_examples=tries(150), deadline=None)
@given(matrices(), matrices())
def test_codes_are_kept_bit_for_bit(one: QuantizedMatrix, other: QuantizedMatrix) -> None:
    """In their own format, and in the one of another matrix, where that holds them."""
    kept, beside = kept_of(one), kept_of(other)
    for rows in {kept.rows, tuple((kept.rows[0][0], format) for _, format in beside.rows)}:
        held = kept.held_as(rows)
        if held is not None and rows[0][1].problem(one.codes().shape[1]) is None:
            assert torch.equal(dequantize_matrix(rows[0][1], *held.runs[0].tensors()), one.dequantize()), rows


def test_groups_of_no_whole_words_are_widened() -> None:
    matrix = QuantizedMatrix("int4", lambda: torch.zeros(2, 96), torch.ones(2, 8), 12)
    (run,) = kept_of(matrix).runs
    assert run.format.is_dense
    assert run.parts[0].reason == "groups of 12 do not divide 96 columns, or are no multiple of 8"


NOT_FINITE = "m: x has scales or minima that are not finite"


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("place", ["scales", "minima"])
def test_scales_and_minima_that_are_not_finite_are_refused(place: str, bad: float) -> None:
    beside = {"scales": torch.ones(2, 2), "minima": torch.ones(2, 2)}
    beside[place][1, 1] = bad
    with pytest.raises(WorkbenchError, match=NOT_FINITE):
        codes = torch.zeros(2, 64, dtype=torch.int8)
        kept_of(QuantizedMatrix("int8", lambda: codes, beside["scales"], 32, minima=beside["minima"]))
    with pytest.raises(WorkbenchError, match=NOT_FINITE):
        kept_in(InWords(Path("m"), "Q5_1", (2, 64), 0, beside)).runs[0].tensors()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_in_fp8_is_refused(code: int) -> None:
    octets = torch.zeros(2, 64, dtype=torch.uint8)
    octets[1, 63] = code
    kept = kept_of(QuantizedMatrix("fp8", lambda: octets.view(torch.float8_e4m3fn), torch.ones(2, 1), 64))
    with pytest.raises(WorkbenchError, match="m: x holds NaN"):
        kept.runs[0].tensors()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_positions_and_norms_by_head_stay_dense(weights: str) -> None:
    """They have two axes and are no products. Norms without weights leave the model's type to who builds it."""
    spec = TINY.model_copy(update={"learned_positions": 2, "norm": NormSpec(kind="layer", weight=False)})
    state = random_weights(spec, torch.float32)
    stored = quantize(dict(state), spec, WeightFormat.parse(weights, quant_group=32))
    model = Transformer.from_state(
        spec, stored, format=WeightFormat.parse(weights, quant_group=32), dtype=torch.float32
    )
    assert model.logits([1, 2]).isfinite().all()
    assert torch.equal(model.dense_state(torch.float32)["positions.weight"], state["positions.weight"])


def test_load_weights_is_dense_by_default(tmp_path: Path) -> None:
    pack(tmp_path / "m", packers.pack_quantized)
    assert not [name for name in load_weights(tmp_path / "m", TINY, torch.float32) if name.endswith("scales")]
