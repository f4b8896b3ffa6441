"""Quantized safetensors: a folder of each format is the dense model that it stands for, bit for bit, or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.formats.folders import PACKERS, TINY, read_packed, same, write_quantized
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.model.formats.bitsandbytes import STATES
from workbench.model.formats.checkpoint import QuantizedMatrix
from workbench.model.formats.open import open_checkpoint
from workbench.model.hf.families import read_spec
from workbench.model.hf.weights import load_weights
from workbench.model.transformer import Transformer
from workbench.testing import packers
from workbench.testing.packers import Packer, edit_config


@pytest.mark.parametrize("name", PACKERS)
def test_a_quantized_folder_is_the_dense_model(tmp_path: Path, name: str) -> None:
    dense = write_quantized(tmp_path / "packed", PACKERS[name])
    spec = read_spec(tmp_path / "packed").model_copy(update={"name": "m"})
    assert spec == read_spec(dense).model_copy(update={"name": "m"})
    states = [load_weights(folder, spec, torch.float32) for folder in (tmp_path / "packed", dense)]
    assert same(*states)
    logits = [Transformer.from_state(spec, state).logits(range(20)) for state in states]
    assert torch.equal(*logits) and logits[0].std() > 0.1


sizes = st.integers(1, 4)


@settings(max_examples=tries(60))
@given(st.data())
def test_matrices_of_any_size_are_unpacked(data: st.DataObject) -> None:
    """Sizes, groups, bits, blocks and values are drawn; what is read is (code - zero) * scale in exact arithmetic."""
    name = data.draw(st.sampled_from(sorted(PACKERS)))
    out, group = 32 * data.draw(sizes), 32 * data.draw(sizes)
    width = group * data.draw(sizes)
    weight = torch.randn(out, width, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 2**30))))
    weight *= 10.0 ** data.draw(st.integers(-2, 2))
    own: dict[str, Any] = {}
    if name.startswith(("gptq", "awq", "int4", "int3")) and name not in ("gptq, one group", "int4 by row"):
        own["group"] = group
    if name in ("fp8 by block", "fp8, DeepSeek's"):
        own["block"] = data.draw(st.tuples(st.integers(1, 140), st.integers(1, 140)))
    if "nf4" in name or name == "fp4":
        weight = weight[: data.draw(st.integers(1, out)), : data.draw(st.integers(1, width))]
        own["block"] = data.draw(st.sampled_from([2, 64, 128]))
    packed = partial(PACKERS[name], **own)(weight)
    found = read_packed(packed)
    assert found.shape == tuple(weight.shape) and torch.equal(found.read(), packed.dense.float())
    assert found.nbytes == sum(tensor.nbytes for tensor in packed.tensors.values())


@settings(max_examples=tries(30))
@given(st.sampled_from([2, 3, 4, 5, 6, 7, 8]), st.integers(1, 70), st.binary(min_size=600, max_size=600))
def test_any_bits_are_unpacked(bits: int, count: int, octets: bytes) -> None:
    from workbench.model.formats.packed import unpack_bits

    values = [octet & (1 << bits) - 1 for octet in octets[:count]]
    packed = torch.from_numpy(packers.words(values, bits).copy())
    assert unpack_bits(packed[None], bits, count)[0].tolist() == values


def test_symmetric_zeros_tell_the_version_that_a_file_got_wrong(tmp_path: Path) -> None:
    weight = torch.randn(32, 64)
    packed = packers.gptq(weight, version=2)
    packed.config["checkpoint_format"] = "gptq"
    assert torch.equal(read_packed(packed).read(), packed.dense.float())


def _config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, lambda config: change(config["quantization_config"]))


def _set(**values: Any) -> Callable[[Path], None]:
    return _config(lambda section: section.update(values))


def _scheme(**values: Any) -> Callable[[Path], None]:
    return _config(lambda section: section["config_groups"]["group_0"]["weights"].update(values))


LAYER = "model.layers.0.self_attn.q_proj."


def _tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")

    return spoil


def _pop(end: str) -> Callable[[Path], None]:
    return _tensors(lambda state: state.pop(LAYER + end))


def _put(end: str, tensor: Tensor) -> Callable[[Path], None]:
    return _tensors(lambda state: state.update({LAYER + end: tensor}))


@pytest.mark.parametrize(
    ("packer", "spoil", "said"),
    [
        ("awq", _set(quant_method="hqq"), "quant_method 'hqq' is not supported; supported: gptq, awq"),
        ("awq", _config(lambda section: section.pop("quant_method")), "quant_method is missing"),
        ("awq", _set(quant_method="fp8"), "says fp8, and no tensor has this format"),
        ("awq", _set(version="gemv"), 'version is "gemv"; it must be gemm'),
        ("awq", _set(bits=8), "bits is 8; it must be 4"),
        ("awq", _set(group_size=64), "scales has shape .*ask for"),
        ("awq", _set(modules_to_not_convert=["self_attn"]), "has 'self_attn', yet the weights of .* are packed"),
        ("awq", _pop("qzeros"), "lacks model.layers.0.self_attn.q_proj.qzeros"),
        ("awq", _put("weight", torch.ones(64, 64)), "q_proj.weight is not a part of"),
        ("awq", _put("scales", torch.ones(2, 64, dtype=torch.int32)), "scales is I32"),
        ("gptq 4 bits", _set(checkpoint_format="marlin"), "checkpoint_format is \"marlin\""),
        ("gptq 4 bits", _set(bits=5), "bits is 5; it must be 2, 3, 4 or 8"),
        ("gptq 4 bits", _set(bits=8), "has shape"),
        ("gptq 4 bits", _set(group_size=0), "group_size is 0"),
        ("gptq 4 bits", _set(dynamic={"x": {"bits": 8}}), "dynamic is"),
        ("gptq 4 bits", _put("g_idx", torch.full((64,), 7, dtype=torch.int32)), r"g_idx must lie in 0\.\.1"),
        ("gptq without g_idx", _set(desc_act=True), "lacks .*g_idx"),
        ("int4", _set(format="marlin-24"), 'format is "marlin-24"'),
        ("int4", _set(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is"),
        ("int4", _set(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is"),
        ("int4", _set(ignore=["re:.*q_proj"]), "ignore has 're:.*q_proj', yet the weights of .* are compressed"),
        ("int4", _set(ignore=["re:("]), "regular expression"),
        ("int4", _config(lambda section: section["config_groups"]["group_0"].update(targets=["re:.*k_proj"])),
         "no target of config_groups matches"),
        ("int4", _scheme(num_bits=8), "weight_shape is"),
        ("int4", _scheme(group_size=64), "weight_scale has shape"),
        ("int4", _scheme(type="float"), 'type is "float"'),
        ("int4", _scheme(symmetric=False), "lacks .*weight_zero_point"),
        ("int4 with zeros", _scheme(symmetric=True), "weight_zero_point is not a part"),
        ("int4", _pop("weight_shape"), "lacks .*weight_shape"),
        ("int4", _put("weight_shape", torch.tensor([64, 9])), "weight_shape is"),
        ("int8", _put("weight", torch.ones(64, 64)), "weight is F32"),
        ("fp8 by block", _scheme(block_structure=[0, 4]), "block_structure is"),
        ("fp8, DeepSeek's", _set(weight_block_size=[128]), "weight_block_size is"),
        ("fp8, DeepSeek's", _set(weight_block_size=[64, 64]), "weight_scale_inv has shape"),
        ("fp8, DeepSeek's", _set(fmt="e5m2"), "fmt is"),
        ("fp8, DeepSeek's", _pop("weight_scale_inv"), "q_proj.weight is stored as F8_E4M3"),
        ("nf4", _set(load_in_8bit=True), "one of load_in_4bit and load_in_8bit must be true"),
        ("nf4", _put("weight.quant_state.bitsandbytes__nf4", torch.zeros(4, dtype=torch.uint8)), "not JSON"),
        ("nf4", _pop("weight.quant_state.bitsandbytes__nf4"), "must have one of"),
        ("nf4", _pop("weight.absmax"), "lacks .*weight.absmax"),
        ("nf4", _put("weight", torch.zeros(3, 1, dtype=torch.uint8)), r"asks for U8 \[2048, 1\]"),
        ("bitsandbytes int8", _put("SCB", torch.ones(3)), "SCB has shape"),
        ("bitsandbytes int8", _put("weight_format", torch.tensor(2, dtype=torch.uint8)), "weight_format must be 0"),
        ("int8", _pop("weight_scale"), "q_proj.weight is stored as I8"),
        ("int4", _pop("weight_packed"), "lacks .*weight_packed"),
        ("int4", _put("strange", torch.ones(2)), "has extra .*strange"),
    ],
)  # fmt: skip
def test_a_spoilt_folder_gets_one_error(tmp_path: Path, packer: str, spoil: Callable[[Path], None], said: str) -> None:
    folder = tmp_path / "m"
    write_quantized(folder, PACKERS[packer])
    spoil(folder)
    with pytest.raises(WorkbenchError, match=said) as caught:
        load_weights(folder, TINY, torch.float32)
    assert str(caught.value).startswith(str(folder)) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ["awq", "gptq 4 bits", "int4", "fp8, DeepSeek's", "nf4"]
    found = {name: tmp_path_factory.mktemp("formats") / "m" for name in names}
    for name, folder in found.items():
        write_quantized(folder, PACKERS[name])
    return found


@settings(max_examples=tries(60))
@given(st.data())
def test_a_changed_number_of_the_config_is_an_error_or_harmless(folders: dict[str, Path], data: st.DataObject) -> None:
    """Any value of the section replaced by any other: an error in one line, or a whole model."""
    folder = folders[data.draw(st.sampled_from(sorted(folders)))]
    whole = (folder / "config.json").read_text()
    junk = st.sampled_from([None, 0, -1, 1, 3, 2**63, 1e400, True, "x", [], [[]], {}, {"x": 1}, [1, 2]])

    def change(section: dict[str, Any]) -> None:
        while True:
            key = data.draw(st.sampled_from(sorted(section)))
            if not isinstance(section[key], dict) or data.draw(st.booleans()):
                break
            section = section[key]
        section[key] = data.draw(junk)

    _config(change)(folder)
    try:
        state = load_weights(folder, TINY, torch.float32)
    except WorkbenchError as error:
        assert "\n" not in str(error)
    else:
        assert all(torch.isfinite(tensor).all() for tensor in state.values())
    finally:
        (folder / "config.json").write_text(whole)


HUGE = 1 << 40


@pytest.mark.parametrize("group", [32, 64, HUGE])
@pytest.mark.parametrize("rows", [1, 48, HUGE])
def test_a_group_of_any_size_ends_with_the_matrix(group: int, rows: int) -> None:
    scales = torch.rand(-(-48 // rows), -(-64 // group))
    codes = torch.randint(-8, 8, (48, 64), dtype=torch.int8)
    found = QuantizedMatrix("int4", lambda: codes, scales, group, rows).dequantize()
    right = codes * scales[(torch.arange(48) // rows)[:, None], torch.arange(64) // group]
    assert torch.equal(found, right)


@pytest.mark.parametrize(("packer", "shape"), [(packers.gptq, (0, 64)), (packers.awq, (0, 8))])
def test_a_matrix_without_numbers_is_refused(packer: Packer, shape: tuple[int, ...]) -> None:
    packed = packer(torch.rand(64, 64))
    packed.config["group_size"] = -1
    packed.tensors["qweight"] = torch.zeros(shape, dtype=torch.int32)
    with pytest.raises(WorkbenchError, match=r"qweight has shape \[0, [0-9]+\]: it holds no numbers"):
        read_packed(packed)


@pytest.mark.parametrize("nested", [False, True])
def test_a_block_of_any_size_ends_with_the_matrix(nested: bool) -> None:
    """bitsandbytes' blocks."""
    packed = packers.nf4(torch.rand(8, 16), nested=nested, block=128)
    state = json.loads(bytes(packed.tensors[STATES[0]].tolist()))
    state |= {"blocksize": HUGE} | ({"nested_blocksize": HUGE} if nested else {})
    packed.tensors[STATES[0]] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    assert torch.equal(read_packed(packed).read().double(), packed.dense)


def test_old_gptq_files_have_a_config_of_their_own(tmp_path: Path) -> None:
    import json

    dense = write_quantized(tmp_path / "m", PACKERS["gptq 4 bits"])

    def move(config: dict[str, Any]) -> None:
        section = config.pop("quantization_config")
        section.pop("quant_method")
        (tmp_path / "m" / "quantize_config.json").write_text(json.dumps(section))

    edit_config(tmp_path / "m", move)
    assert same(*(load_weights(folder, TINY, torch.float32) for folder in (tmp_path / "m", dense)))
    assert open_checkpoint(tmp_path / "m").format == "GPTQ 4 bits in groups of 32"


def test_groups_of_config_groups_differ(tmp_path: Path) -> None:
    """Matrices by name and by regular expression before those by class."""
    dense = write_quantized(tmp_path / "m", packers.pack_quantized)

    def change(section: dict[str, Any]) -> None:
        four = section["config_groups"].pop("group_0")
        eight = {**four, "targets": ["Linear"], "weights": {**four["weights"], "num_bits": 8}}
        named = {**four, "targets": ["re:.*_proj$"]}
        section["config_groups"] = {"a": eight, "b": named}

    _config(change)(tmp_path / "m")
    assert same(*(load_weights(folder, TINY, torch.float32) for folder in (tmp_path / "m", dense)))
