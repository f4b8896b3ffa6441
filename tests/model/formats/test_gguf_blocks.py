"""Blocks of GGUF tensors, held against the plain numpy of the `gguf` package on random bytes."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.linear.matrix_format import WORDS, WordLayout
from tests.helpers.kernels import needs_mlir
from tests.thorough import tries
from tools.lint.tree import ROOT, pages
from workbench.model.formats.gguf import blocks as gguf_blocks
from workbench.model.formats.gguf.blocks import (
    BLOCK_TYPES,
    UNREAD_TYPES,
    BlockType,
    Plane,
    dequantize_blocks,
    matrix_in_words,
)

gguf = pytest.importorskip("gguf", reason="the yardstick: pip install gguf")


def reference(type: BlockType, data: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.dequantize(data.reshape(-1, type.bytes), gguf.GGMLQuantizationType[type.name]).reshape(-1)


def assert_same_bits(found: torch.Tensor, right: np.ndarray) -> None:
    """Equal to the bit, the sign of a zero included; a NaN is a NaN."""
    ours = found.numpy()
    assert ours.dtype == right.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(right))
    there = ~np.isnan(right)
    np.testing.assert_array_equal(ours[there].view(np.uint32), right[there].view(np.uint32))


@pytest.mark.parametrize("type", BLOCK_TYPES.values(), ids=lambda type: type.name)
@settings(max_examples=tries(60))
@given(data=st.data())
def test_any_bytes_are_what_the_package_reads(type: BlockType, data: st.DataObject) -> None:
    """Random bytes hold every scale: infinite, NaN, subnormal and negative ones."""
    blocks = data.draw(st.integers(1, 5))
    stored = np.frombuffer(data.draw(st.binary(min_size=blocks * type.bytes, max_size=blocks * type.bytes)), np.uint8)
    assert_same_bits(dequantize_blocks(type, torch.from_numpy(stored.copy())), reference(type, stored))


@pytest.mark.parametrize("type", BLOCK_TYPES.values(), ids=lambda type: type.name)
def test_many_random_blocks(type: BlockType) -> None:
    """Of MXFP4 they hold every code with every exponent."""
    stored = np.random.default_rng(0).integers(0, 256, 4096 * type.bytes, dtype=np.uint8)
    assert_same_bits(dequantize_blocks(type, torch.from_numpy(stored)), reference(type, stored))


@pytest.mark.parametrize("type", [type for type in BLOCK_TYPES.values() if type.format], ids=lambda type: type.name)
def test_words_are_the_files_bits_in_another_order(type: BlockType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes, and each bit of a block is one bit of its words or scales: of blocks with one bit set each."""
    count = 8 * type.bytes
    stored = np.packbits(np.eye(count, dtype=np.uint8), axis=1, bitorder="little")
    monkeypatch.setattr(gguf_blocks, "CHUNK_BYTES", 7 * type.bytes)
    parts = [part.view(torch.uint8).numpy() for part in matrix_in_words(type, torch.from_numpy(stored.ravel()), count)]
    bits = np.unpackbits(np.concatenate(parts, axis=1), axis=1)
    assert bits.shape == (count, count)
    assert (bits.sum(0) == 1).all() and (bits.sum(1) == 1).all()


@needs_mlir
def test_a_format_is_the_two_lines_that_the_guide_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any codes are what the package reads, and products of eager and mlir are those of these numbers."""
    known = {"WordLayout": WordLayout, "BlockType": BlockType, "Plane": Plane}
    lines = re.findall(r"`[^`:]*: (\w+\([^`]*\)),`", pages(ROOT)["docs/guide/backends.md"])
    words, type = (eval(line, known) for line in lines)
    monkeypatch.setitem(WORDS, type.name.lower(), words)
    stored = np.random.default_rng(0).integers(0, 256, (64, type.bytes), dtype=np.uint8)
    stored[:, -2:] = 0, 60  # a scale of one
    numbers = dequantize_blocks(type, torch.from_numpy(stored).flatten())
    assert_same_bits(numbers, reference(type, stored))
    x = torch.eye(type.values)[::17]
    codes, scales = matrix_in_words(type, torch.from_numpy(stored).flatten(), 64)
    for backend in (Backend.EAGER, Backend.MLIR):
        found = compiled_kernels.linear_quantized(x, codes, scales, None, None, type.name.lower(), backend=backend)
        assert torch.equal(found, x @ numbers.view(64, -1).T), backend


@pytest.mark.parametrize("type", BLOCK_TYPES.values(), ids=lambda type: type.name)
def test_chunks_make_no_difference_and_a_dtype_only_rounds(type: BlockType, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 7 * type.bytes, dtype=np.uint8))
    whole = dequantize_blocks(type, stored)
    monkeypatch.setattr(gguf_blocks, "CHUNK_VALUES", 3 * type.values)
    assert_same_bits(dequantize_blocks(type, stored), whole.numpy())
    rounded = dequantize_blocks(type, stored, torch.bfloat16)
    torch.testing.assert_close(rounded, whole.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


def test_the_tables_are_the_packages() -> None:
    sizes = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    for number, type in BLOCK_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == type.name and sizes[type.name] == (type.values, type.bytes)
    names = {number: gguf.GGMLQuantizationType(number).name for number in UNREAD_TYPES}
    assert names == UNREAD_TYPES and not UNREAD_TYPES.keys() & BLOCK_TYPES.keys()
    assert {kind.value for kind in gguf.GGMLQuantizationType} == UNREAD_TYPES.keys() | BLOCK_TYPES.keys()
