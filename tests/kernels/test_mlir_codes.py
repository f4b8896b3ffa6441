"""Codes in few bits become the numbers that they stand for, all of them and exactly."""

from __future__ import annotations

import pytest
import torch

from compiled_kernels.level import Level
from compiled_kernels.linear.mlir_codes import CODE_BITS, TABLES, code_unit, code_vectors
from compiled_kernels.mlir import compile_text
from compiled_kernels.mlir.invoke import BoundCall, libgomp_path
from compiled_kernels.mlir_text import THREADS, Lines, vector
from tests.helpers.kernels import needs_mlir
from tests.helpers.levels import at_every_level
from tests.helpers.rows import rows

OCTETS = torch.arange(256, dtype=torch.uint8)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = {
    "i8": OCTETS.view(torch.int8).float(), "f8": OCTETS.view(torch.float8_e4m3fn).float(),
    "i4": torch.arange(-8.0, 8.0), "u4": torch.arange(16.0), "f4": torch.cat([E2M1, -E2M1]),
}  # fmt: skip


def decoder(kind: str, count: int, joined: bool, element: str = "f32") -> str:
    """Emit @decode(bytes, numbers): every byte as its numbers, `count` bytes at a time."""
    values = 8 // CODE_BITS[kind]  # in a byte
    vectors = 1 if joined else values
    lanes = count * values // vectors
    out = f"memref<{vectors}x{256 * values // vectors}x{element}>"
    lines = Lines()
    lines.emit(f"scf.for %at = {lines.index(0)} to {lines.index(256)} step {lines.index(count)} {{")
    loaded = lines.load("%codes", "%at", "memref<256xi8>", count, "i8")
    place = lines.let(f"arith.muli %at, {lines.index(lanes // count)} : index")
    for number, found in enumerate(code_vectors(lines, kind, loaded, count, element, joined)):
        lines.emit(f"vector.store {found}, %out[{lines.index(number)}, {place}] : {out}, {vector(lanes, element)}")
    lines.emit("}")
    return f"{THREADS}\nfunc.func @decode(%codes: memref<256xi8>, %out: {out}) {{\n{lines.text()}\nreturn\n}}"


@needs_mlir
@at_every_level
@rows({"kind": list(VALUES), "count": [1, 4, 8, 16, 32]})
def test_every_code_is_its_value(kind: str, count: int, level: Level) -> None:
    four = CODE_BITS[kind] == 4
    for joined in (False, True) if four else (False,):
        kernel = compile_text(decoder(kind, count, joined), "decode", level=level, libraries=(libgomp_path(),))
        found = torch.full((512 if four else 256,), torch.nan)
        BoundCall(kernel.address, (OCTETS, found))(1)
        low, high = VALUES[kind][OCTETS.long() & 15], VALUES[kind][OCTETS.long() >> 4]
        expected = VALUES[kind]
        if four:
            runs = torch.stack([low.view(-1, count), high.view(-1, count)], dim=1 if joined else 0)
            expected = runs.flatten()
        right = (found * code_unit(kind) == expected) | expected.isnan()
        assert right.all(), (joined, found * code_unit(kind), expected)
        assert torch.equal(found.signbit()[right], expected.signbit()[right]) or expected.isnan().any()


@pytest.mark.parametrize("kind", TABLES)
def test_tables_are_exact_in_bfloat16(kind: str) -> None:
    table = torch.tensor(TABLES[kind], dtype=torch.bfloat16)
    assert torch.equal(table.float() * code_unit(kind), VALUES[kind])


@needs_mlir
@pytest.mark.parametrize("kind", CODE_BITS)
@pytest.mark.parametrize("count", [16, 32])
def test_pairs_of_bfloat16_compile(kind: str, count: int) -> None:
    joined = count == 16 and CODE_BITS[kind] == 4
    text = decoder(kind, count if joined else 32, joined, "bf16")
    assert compile_text(text, "decode", level=Level.V4_BF16, libraries=(libgomp_path(),)).digest
