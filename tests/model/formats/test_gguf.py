"""The reader of GGUF files: equal to the `gguf` package's, quicker, and proof against hostile headers."""

from __future__ import annotations

import math
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.calls import calls_of
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.model.formats.gguf.file import GGUFArray, GGUFFile, open_gguf

gguf = pytest.importorskip("gguf", reason="the yardstick: pip install gguf")

VALUES: dict[str, Any] = {
    "a.u8": ("add_uint8", 255), "a.i8": ("add_int8", -128), "a.u16": ("add_uint16", 65535),
    "a.i16": ("add_int16", -3), "a.u32": ("add_uint32", 2**32 - 1), "a.i32": ("add_int32", -(2**31)),
    "a.f32": ("add_float32", 0.5), "a.u64": ("add_uint64", 2**64 - 1), "a.i64": ("add_int64", -(2**63)),
    "a.f64": ("add_float64", math.pi), "a.yes": ("add_bool", True), "a.text": ("add_string", "Grüße 🙂"),
    "a.words": ("add_array", ["a", "▁b", "日本", "\n"]), "a.numbers": ("add_array", [1, 2, -3]),
    "a.shares": ("add_array", [0.5, -1.25]),
}  # fmt: skip


def write(path: Path, tensors: dict[str, np.ndarray], kind: str = "F32", values: Any = VALUES, align: int = 0) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if align:
        writer.add_custom_alignment(align)
    for key, (add, value) in values.items():
        getattr(writer, add)(key, value)
    type = gguf.GGMLQuantizationType[kind]
    for name, tensor in tensors.items():
        writer.add_tensor(name, gguf.quants.quantize(tensor, type), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    tensors = {"one.weight": random(3, 64), "two.weight": random(2, 5, 32, seed=1), "norm": random(7, seed=2)}
    return write(tmp_path_factory.mktemp("gguf") / "good.gguf", tensors).read_bytes()


def test_every_type_of_metadata(tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path / "a.gguf", {}))
    read = {key: value.values() if isinstance(value, GGUFArray) else value for key, value in file.metadata.items()}
    assert read == {"general.architecture": "llama", **{key: value for key, (_, value) in VALUES.items()}}
    assert file.version == 3 and len(file.metadata["a.words"]) == 4


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
@pytest.mark.parametrize("align", [0, 8, 256])
def test_tensors_are_those_of_the_package(tmp_path: Path, kind: str, align: int) -> None:
    """Three tensors of several shapes; the package's reader is the yardstick."""
    tensors = {"a": random(3, 64), "b.weight": random(2, 5, 32, seed=1), "c": random(32, seed=2)}
    path = write(tmp_path / "a.gguf", tensors, kind, align=align)
    file, theirs = GGUFFile(path), {each.name: each for each in gguf.GGUFReader(path).tensors}
    assert file.tensors.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert file.tensors[name].shape == tuple(int(size) for size in reversed(tensor.shape))
        right = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(file.tensors[name].shape)
        np.testing.assert_array_equal(file.read(name).numpy(), right)
        assert file.blocks(name).numpy().tobytes() == tensor.data.tobytes()


def test_a_tensor_stored_in_the_wanted_type_is_a_view_and_writing_to_it_leaves_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", {"a": random(3, 64)})
    file, before = GGUFFile(path), path.read_bytes()
    tensor = file.read("a")
    assert tensor.data_ptr() == file.blocks("a").data_ptr()
    tensor.zero_()
    assert path.read_bytes() == before


def test_version_2_is_read_and_others_are_not(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(good[:4] + struct.pack("<I", 2) + good[8:])
    assert GGUFFile(path).version == 2
    for version in (0, 1, 4, 2**32 - 1):
        path.write_bytes(good[:4] + struct.pack("<I", version) + good[8:])
        with pytest.raises(WorkbenchError, match="version"):
            GGUFFile(path)
    path.write_bytes(good[:4] + struct.pack(">I", 3) + good[8:])
    with pytest.raises(WorkbenchError, match="big-endian"):
        GGUFFile(path)


@pytest.mark.parametrize("start", [b"", b"GGUF", b"GGML" + b"\0" * 60, b"version https://git-lfs.github.com/spec/v1"])
def test_what_is_no_gguf(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(start)
    with pytest.raises(WorkbenchError, match="GGUF|LFS"):
        GGUFFile(tmp_path / "a.gguf")
    with pytest.raises(WorkbenchError, match="cannot be read"):
        GGUFFile(tmp_path / "none.gguf")


def opened(path: Path, content: bytes) -> GGUFFile | str:
    """Open the file; return it, or its error. Nothing else may be raised, and no memory be taken."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        return GGUFFile(path)
    except WorkbenchError as error:
        assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 600
        return str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4_000_000


@settings(max_examples=tries(300), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_truncated_file_is_refused_at_any_length(tmp_path: Path, good: bytes, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(good) - 1))
    file = opened(tmp_path / "a.gguf", good[:length])
    # The last tensor may be followed by padding, which is not missed.
    assert isinstance(file, str) or length >= max(each.start + each.size for each in file.tensors.values())


@settings(max_examples=tries(600), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_in_the_header_is_one_error_or_none(tmp_path: Path, good: bytes, data: st.DataObject) -> None:
    """A number of 1 to 8 bytes is replaced by a small or huge one; what is opened can be read."""
    end = len(good) - 3 * 64 * 4
    at, size = data.draw(st.integers(0, end)), data.draw(st.sampled_from([1, 2, 4, 8]))
    huge = st.sampled_from([0, 1, 2**7, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1, 2**64 - 8])
    number = data.draw(huge | st.integers(0, 2**64 - 1)) % 2 ** (8 * size)
    file = opened(tmp_path / "a.gguf", good[:at] + number.to_bytes(size, "little") + good[at + size :])
    if isinstance(file, GGUFFile):
        for name in file.tensors:
            assert file.read(name).shape == file.tensors[name].shape
        for value in file.metadata.values():
            if isinstance(value, GGUFArray):
                try:
                    assert len(value.values()) == len(value)
                except WorkbenchError as error:
                    assert "UTF-8" in str(error)


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def header(tensors: bytes = b"", pairs: bytes = b"", count: int | None = None, pair_count: int | None = None) -> bytes:
    """Return a file's beginning; unless a count is given, it says one of what is there."""
    counts = int(bool(tensors)) if count is None else count, int(bool(pairs)) if pair_count is None else pair_count
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + pairs + tensors


def info(name: str = "a", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def pair(*values: int, form: str, key: str | bytes = "k") -> bytes:
    return text(key) + struct.pack(form, *values)


def array(kind: int, *values: int) -> bytes:
    return pair(9, kind, *values, form="<II" + "Q" * len(values))


ONE, SECOND = info(), info("b")
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"count": 2**60}, "1,152,921,504,606,846,976 tensors"),
    ({"pair_count": 2**60}, "metadata entries"),
    ({"pairs": struct.pack("<Q", 2**60)}, "a metadata key has"),
    ({"pairs": text("k" * 70_000)}, "a metadata key of 70,000"),
    ({"pairs": pair(8, 2**60, form="<IQ")}, "'k'"),
    ({"pairs": array(4, 2**60)}, "entries in k"),
    ({"pairs": array(8, 3, 2**60)}, "entry 1 of 3"),
    ({"pairs": array(8, 1, 2**60)}, "last entry"),
    ({"pairs": array(9, 1)}, "unknown type, 9"),
    ({"pairs": pair(77, form="<I")}, "type, 77"),
    ({"pairs": 2 * pair(0, 1, form="<IB"), "pair_count": 2}, "'k' occurs twice"),
    ({"pairs": text(b"\xff")}, "no UTF-8"),
    ({"tensors": ONE + info(offset=128), "count": 2}, "'a' occurs twice"),
    ({"tensors": ONE + info("b", offset=96), "count": 2}, "b overlaps a"),
    ({"tensors": ONE + SECOND, "count": 2}, "overlaps"),
    ({"tensors": info(offset=4)}, "aligned to 32"),
    ({"tensors": info(offset=2**60)}, "cut short"),
    ({"tensors": info(offset=2**64 - 32)}, "cut short"),
    ({"tensors": info(shape=(2**60, 2**60))}, "cut short"),
    ({"tensors": info(shape=(2**32, 2**32))}, "cut short"),  # a product that is small in 64 bits
    ({"tensors": info(shape=(32, 0))}, r"shape \[0, 32\]"),
    ({"tensors": info(shape=())}, "0 dimensions"),
    ({"tensors": info(shape=(1,) * 5)}, "5 dimensions"),
    ({"tensors": info(shape=(48,), kind=2)}, "multiple of 32"),
    ({"tensors": info(kind=99)}, "type 99, which is unknown"),
    ({"tensors": info(kind=23)}, "stored as IQ4_XS; supported: F32, .*MXFP4"),
    ({"tensors": ONE, "pairs": pair(4, 24, form="<II", key="general.alignment")}, "power of two"),
]


@pytest.mark.parametrize(("parts", "message"), HOSTILE, ids=[message for _, message in HOSTILE])
def test_hostile_headers(tmp_path: Path, parts: dict[str, Any], message: str) -> None:
    found = opened(tmp_path / "a.gguf", header(**parts) + b"\0" * 4096)
    assert isinstance(found, str) and re.search(message, found), found


def test_a_large_vocabulary_takes_a_call_a_text(tmp_path: Path) -> None:
    """To find its end; another to read it. The package makes objects of each, in more than fifty calls."""
    count = 20_000
    words = [f"token{index}" for index in range(count)]
    merges = [f"tok en{index}" for index in range(count)]
    values = {"tokenizer.ggml.tokens": ("add_array", words), "tokenizer.ggml.merges": ("add_array", merges)}
    path = write(tmp_path / "a.gguf", {"a": random(3, 64)}, values=values)
    files: list[GGUFFile] = []
    assert calls_of(lambda: files.append(GGUFFile(path))) < 2 * count + 1000
    tokens = files[0].metadata["tokenizer.ggml.tokens"]
    assert calls_of(tokens.values) < 2 * count + 1000
    assert tokens.values() == words


def test_a_file_is_open_once_and_anew_when_it_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", {"token_embd.weight": random(3, 64)})
    file = open_gguf(path)
    assert open_gguf(path) is file
    write(path, {"a": random(3, 32)})
    assert open_gguf(path).tensors.keys() == {"a"}


def test_a_mistyped_tensor(tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path / "a.gguf", {"token_embd.weight": random(3, 64)}))
    with pytest.raises(WorkbenchError, match="did you mean 'token_embd.weight'"):
        file.read("token_emb.weight")
    assert isinstance(file.read("token_embd.weight", torch.bfloat16), torch.Tensor)
