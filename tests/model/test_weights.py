from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.linear.matrix_format import DENSE_MATRIX, INT8_MATRIX, MatrixFormat
from compiled_kernels.linear.quantize import dequantize_matrix, quantize_matrix
from tests.helpers.refusals import refuses
from tests.model.formats.folders import same
from tests.model.strategies import llama_specs
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.model.hf import weights
from workbench.model.hf.families import read_spec
from workbench.model.hf.save import save_folder
from workbench.model.hf.weights import load_weights, random_weights
from workbench.model.linear import Linear, stored_as
from workbench.model.model_parameters import parameter_shapes
from workbench.model.quantized import WeightFormat, quantize
from workbench.model.shapes import named_shape
from workbench.model.spec import ModelSpec

TINY, SEEDS = named_shape("tiny"), st.integers(0, 2**31)
EXACT = torch.float32
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
INDEX = "model.safetensors.index.json"


def state_of(seed: int = 0) -> dict[str, Tensor]:
    return random_weights(TINY, EXACT, seed)


def save(folder: Path, state: dict[str, Tensor] | None = None, shard_bytes: int = 10**9) -> dict[str, Tensor]:
    """Save a state of TINY; a random one if none is given."""
    state = state_of() if state is None else state
    save_folder(folder, TINY, state, EXACT, shard_bytes=shard_bytes)
    return state


def load(folder: Path) -> dict[str, Tensor]:
    return load_weights(folder, TINY, EXACT)


@settings(max_examples=tries(40))
@given(llama_specs(), DTYPES, st.sampled_from([64, 2000, 10**9]))
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, spec: ModelSpec, dtype: torch.dtype, shard_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("model")
    state = random_weights(spec, dtype, seed=1)
    save_folder(folder, spec, state, dtype, shard_bytes=shard_bytes)
    assert same(load_weights(folder, spec, dtype), state)
    assert read_spec(folder) == spec.model_copy(update={"name": folder.name})
    assert not list(folder.glob("*.tmp"))


@given(llama_specs(), DTYPES)
def test_states_have_the_shapes_of_the_spec(spec: ModelSpec, dtype: torch.dtype) -> None:
    state = random_weights(spec, dtype)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == parameter_shapes(spec)
    assert sum(tensor.numel() for tensor in state.values()) == spec.num_parameters


def test_loading_casts(tmp_path: Path) -> None:
    state = save(tmp_path)
    expected = {name: tensor.bfloat16() for name, tensor in state.items()}
    assert same(load_weights(tmp_path, TINY, torch.bfloat16), expected)


def test_fused_rows_are_query_key_value_and_gate_up(tmp_path: Path) -> None:
    state = save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.1."
    qkv = [stored[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(torch.cat(qkv), state["blocks.1.attention.qkv.weight"])
    gate_up = [stored[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(torch.cat(gate_up), state["blocks.1.feedforward.gate_up.weight"])


def test_tensors_that_need_no_work_stay_memory_mapped(tmp_path: Path) -> None:
    save(tmp_path)
    state = load(tmp_path)
    fused = {name for name in state if "qkv" in name or "gate_up" in name}
    assert {name for name, tensor in state.items() if not _mapped(tensor, "model.safetensors")} == fused


def _mapped(tensor: Tensor, file: str) -> bool:
    ranges = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(file)]
    bounds = [[int(end, 16) for end in each.split("-")] for each in ranges]
    return any(low <= tensor.data_ptr() < high for low, high in bounds)


@given(st.integers(0, 2**62), DTYPES)
@settings(max_examples=tries(10))
def test_random_weights_depend_on_seed_and_name_alone(seed: int, dtype: torch.dtype) -> None:
    state = state_of(seed)
    rounded = {name: tensor.to(dtype) for name, tensor in state.items()}
    assert same(random_weights(TINY, dtype, seed), rounded)
    deeper = random_weights(TINY.model_copy(update={"layers": TINY.layers * 2}), EXACT, seed)
    assert torch.equal(deeper["blocks.1.attention.qkv.weight"], state["blocks.1.attention.qkv.weight"])
    assert not torch.equal(state["blocks.0.attention.qkv.weight"], state["blocks.1.attention.qkv.weight"])
    assert not torch.equal(state_of(seed + 1)["embedding.weight"], state["embedding.weight"])


def test_random_weights_are_normal_and_norms_are_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "DRAW_CHUNK", 1000)  # so that a parameter takes several draws
    state = state_of()
    assert torch.equal(state["norm.weight"], torch.ones(TINY.hidden_size))
    head = state["head.weight"] * TINY.hidden_size**0.5
    assert head.std().item() == pytest.approx(1, rel=0.05) and abs(head.mean().item()) < 0.05
    assert (head.abs() < 1).float().mean().item() == pytest.approx(0.683, abs=0.02)
    assert head.unique().numel() > 0.9 * head.numel()
    added = state["blocks.0.feedforward.down.weight"].std().item()
    assert added == pytest.approx((128 * 2 * 2) ** -0.5, rel=0.05)


def test_saving_replaces_the_model_that_stood_there(tmp_path: Path) -> None:
    state = {}
    for seed, shard_bytes in enumerate([20_000, 10**9, 50_000]):
        state = save(tmp_path, state_of(seed), shard_bytes)
        assert same(load(tmp_path), state)
    save(tmp_path, load(tmp_path))  # from the very files that are replaced
    assert same(load(tmp_path), state)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_saving_copies_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = tmp_path / "other.json"
    tokenizer.write_text("{}")
    save_folder(tmp_path / "m", TINY, state_of(), EXACT, tokenizer)
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "{}"


def test_a_state_that_is_not_the_specs_is_not_saved(tmp_path: Path) -> None:
    state = state_of()
    for wrong, said in [
        ({**state, "more": state["norm.weight"]}, "more is no parameter of the spec"),
        ({name: tensor for name, tensor in state.items() if name != "norm.weight"}, "norm.weight is missing"),
        ({**state, "norm.weight": torch.ones(3)}, r"norm.weight has shape \[3\], the spec asks for \[64\]"),
    ]:
        refuses(said, save, tmp_path / "m", wrong)
    (tmp_path / "file").write_text("")
    refuses("cannot be written", save, tmp_path / "file", state)


Spoil = Callable[[Path], object]


def _edit(change: Callable[[dict[str, Tensor]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")

    return spoil


def _replace(name: str, *shape: int, dtype: torch.dtype = EXACT) -> Spoil:
    return _edit(lambda state: state.update({name: torch.ones(*shape, dtype=dtype)}))


def _write(name: str, content: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content)


def _only(name: str) -> Spoil:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


WEIGHTS = "model.safetensors"
LAST = "model.norm.weight"
LAYER = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / WEIGHTS).unlink(), "holds no weights; it must hold model.safetensors, or"),
        (_only("pytorch_model.bin"), "pytorch_model.bin: is refused: it is cut short, or pickled without an archive"),
        (_only("consolidated.00.pth"), "consolidated.00.pth is refused: it is pickled.*safetensors: python -c"),
        (_only("model-00001-of-00002.safetensors"), "but neither model.safetensors nor"),
        (_write(WEIGHTS, b""), "cut short in its header"),
        (_write(WEIGHTS, struct.pack("<Q", 1000) + b"{}"), "cut short in its header"),
        (_write(WEIGHTS, struct.pack("<Q", 4) + b"{{{{"), "header is not JSON"),
        (_write(WEIGHTS, struct.pack("<Q", 2) + b"[]"), "the header is no JSON object"),
        (_write(WEIGHTS, struct.pack("<Q", 7) + b'{"a":1}'), "entry for a is malformed"),
        (_write(WEIGHTS, struct.pack("<Q", 10**8 + 1)), "cut short in its header"),
        (_write(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (_cut, r"cut short \([\d,]+ of [\d,]+ bytes of data are there\); fetch the file again"),
        (_edit(lambda state: state.pop("model.norm.weight")), "lacks model.norm.weight"),
        (_edit(lambda state: state.pop("lm_head.weight")), "lacks lm_head.weight; .*tie_word_embeddings"),
        (_replace(f"{LAYER}.q_proj.bias", 64), "has extra .*q_proj.bias"),
        (_replace(f"{LAYER}.k_proj.weight", 64, 32),
         re.escape(f"{LAYER}.k_proj.weight has shape [64, 32], config.json asks for [32, 64]")),
        (_replace("model.norm.weight", 64, dtype=torch.int8),
         "norm.weight is stored as I8; supported: F64, F32, F16, BF16, others with quantization_config"),
    ],
)  # fmt: skip
def test_a_spoilt_folder_gets_a_clear_error(tmp_path: Path, spoil: Spoil, said: str) -> None:
    check_spoilt(tmp_path, spoil, said)


def check_spoilt(folder: Path, spoil: Spoil, said: str, shard_bytes: int = 10**9) -> None:
    save(folder, shard_bytes=shard_bytes)
    spoil(folder)
    refuses(f"^{re.escape(str(folder))}.*{said}", load, folder)


def _index(change: Callable[[dict[str, str]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda folder: min(folder.glob("model-00002-*")).unlink(),
            r"1 of \d+ shards are missing: model-00002-of-",
        ),
        (_write(INDEX, b"{"), "is not valid JSON"),
        (_write(INDEX, b"{}"), "weight_map must map tensor names to file names"),
        (_write(INDEX, b'{"weight_map": {"a": 1}}'), "weight_map must map"),
        (
            _index(lambda places: places.update({LAST: "../x.safetensors"})),
            "plain name",
        ),
        (
            _index(lambda places: places.update({LAST: min(places.values())})),
            "which does not hold it",
        ),
        (_index(lambda places: places.pop(LAST)), "lacks model.norm.weight"),
    ],
)
def test_a_spoilt_index_gets_a_clear_error(tmp_path: Path, spoil: Spoil, said: str) -> None:
    check_spoilt(tmp_path, spoil, said, 50_000)


@settings(max_examples=tries(60))
@given(st.data())
def test_any_damage_is_noticed_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Cut anywhere, or a byte of the header changed: a clear error or the shapes of the spec."""
    folder = tmp_path_factory.mktemp("damaged")
    save(folder)
    file = folder / WEIGHTS
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans(), label="cut"):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        header = 8 + struct.unpack("<Q", content[:8])[0]
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        state = load(folder)
    except WorkbenchError as error:
        assert "\n" not in str(error)
    else:
        assert {name: tuple(tensor.shape) for name, tensor in state.items()} == parameter_shapes(TINY)


def test_known_harmless_extras_are_ignored(tmp_path: Path) -> None:
    spec = TINY.model_copy(update={"tie_word_embeddings": True})
    state = random_weights(spec, EXACT)
    save_folder(tmp_path, spec, state, EXACT)
    extras = {"lm_head.weight": torch.ones(257, 64), f"{LAYER}.rotary_emb.inv_freq": torch.ones(8)}
    _edit(lambda stored: stored.update(extras))(tmp_path)
    assert same(load_weights(tmp_path, spec, EXACT), state)


FORMATS = [
    DENSE_MATRIX,
    INT8_MATRIX,
    MatrixFormat("int4", 32, torch.float16),
    *map(MatrixFormat.named, ("q5_0", "q8_0")),
]


@settings(max_examples=tries(30))
@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(FORMATS)), min_size=1, max_size=4), st.booleans(), SEEDS)
def test_a_matrix_in_several_formats_is_the_product_of_its_rows(
    rows: list[tuple[int, MatrixFormat]], bias: bool, seed: int
) -> None:
    """Each run of rows is quantized by itself, under names of its own, and its outputs get its part of the bias."""
    generator = torch.Generator().manual_seed(seed)
    state = {"a.weight": torch.randn(sum(count for count, _ in rows), 64, generator=generator)}
    format = WeightFormat(own=(("a.weight", tuple(rows)),))
    stored = quantize(dict(state), TINY, format)
    linear = stored_as(Linear(64, len(state["a.weight"]), bias, Backend.EAGER), tuple(rows))
    names = {name.removeprefix("a."): tensor for name, tensor in stored.items()}
    if bias:
        names["bias"] = torch.randn(len(state["a.weight"]), generator=generator)
    linear.load_state_dict(names, assign=True)
    dense = linear.lookup_rows(slice(None), torch.float32)
    counts = [count for count, _ in rows]
    for own, part, (_, each) in zip(dense.split(counts), state["a.weight"].split(counts), rows, strict=True):
        exact = part if each.is_dense else dequantize_matrix(each, *quantize_matrix(part, each))
        assert torch.equal(own, exact)
    x = torch.randn(3, 64, generator=generator)
    right = torch.nn.functional.linear(x, dense, names.get("bias"))
    torch.testing.assert_close(linear(x), right, rtol=1e-4, atol=1e-4)
