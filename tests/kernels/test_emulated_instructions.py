"""Instructions that `builder/vectors.py` names give what their plain form gives: emulated, and by a processor that has
them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels.builder.functions import function, text_of
from compiled_kernels.builder.target import Named, memref
from compiled_kernels.builder.values import Value
from compiled_kernels.builder.vectors import (
    dot_bytes,
    dot_bytes_in_pairs,
    dot_pairs,
    dot_words,
    look_up,
    look_up_bytes,
    look_up_floats,
)
from compiled_kernels.level import Level, available_levels
from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir import compile as compiling
from tests.helpers.kernels import needs_mlir

WORDS = 16  # of 32 bits in a vector
TABLES = {count: [float((7 * i) % count) - 8 for i in range(count)] for count in (16, 32, 64)}

words = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=WORDS, max_size=WORDS).map(
    lambda numbers: torch.tensor(numbers, dtype=torch.int32)
)


def parts(of: Tensor, dtype: torch.dtype) -> Tensor:
    return of.view(dtype).view(WORDS, -1)


def pair_sums(sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
    products = parts(a, torch.int16).long() * parts(b, torch.int16).long()
    return (sums + products.sum(-1)).int()


def byte_sums(sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (sums + (parts(a, torch.uint8).long() * parts(b, torch.int8).long()).sum(-1)).int()


def saturated_byte_sums(_: Tensor, a: Tensor, b: Tensor) -> Tensor:
    products = a.view(torch.uint8).int() * b.view(torch.int8).int()
    return products.view(-1, 2).sum(-1).clamp(-(1 << 15), (1 << 15) - 1).to(torch.int16).view(torch.int32)


def bytes_looked_up(_: Tensor, codes: Tensor, __: Tensor) -> Tensor:
    return torch.tensor(TABLES[16]).to(torch.int8)[codes.view(torch.uint8).int() & 15].view(torch.int32)


def looked_up(count: int) -> Callable[..., Tensor]:
    def plain(_: Tensor, codes: Tensor, __: Tensor) -> Tensor:
        numbers = torch.tensor(TABLES[count]).bfloat16()[parts(codes, torch.int16).int() & (count - 1)]
        return numbers.contiguous().view(torch.int32).flatten()

    return plain


def floats_looked_up(_: Tensor, codes: Tensor, __: Tensor) -> Tensor:
    return torch.tensor(TABLES[16])[codes & 15].view(torch.int32)


INSTRUCTIONS: dict[str, tuple[Level, Callable[[Value, Value, Value], Value], Callable[..., Tensor]]] = {
    "VPMADDWD": (Level.V4, lambda sums, a, b: sums + dot_words(a, b), pair_sums),
    "VPDPBUSD": (Level.V4_VNNI, dot_bytes, byte_sums),
    "VPMADDUBSW": (Level.V4, lambda sums, a, b: dot_bytes_in_pairs(a, b).bits("i32"), saturated_byte_sums),
    "VPSHUFB": (
        Level.V4,
        lambda sums, a, b: look_up_bytes([int(each) for each in TABLES[16]], a & 0x0F0F0F0F),
        bytes_looked_up,
    ),
    "VPERMW, 16": (Level.V4, lambda sums, a, b: look_up(TABLES[16], a).bits("i32"), looked_up(16)),
    "VPERMW, 32": (Level.V4, lambda sums, a, b: look_up(TABLES[32], a).bits("i32"), looked_up(32)),
    "VPERMI2W": (Level.V4, lambda sums, a, b: look_up(TABLES[64], a).bits("i32"), looked_up(64)),
    "VPERMPS": (Level.V4, lambda sums, a, b: look_up_floats(TABLES[16], a).bits("i32"), floats_looked_up),
    "VDPBF16PS": (
        Level.V4_BF16,
        lambda sums, a, b: dot_pairs(sums.to("f32"), a.bits("bf16"), b.bits("bf16")).bits("i32"),
        lambda sums, a, b: (
            sums.double() + (parts(a, torch.bfloat16).double() * parts(b, torch.bfloat16).double()).sum(-1)
        ),
    ),
}


@cache
def kernel_of(name: str, executed: Level) -> Kernel:
    """f(sums, a, b, out) of the code for `executed`, of an instruction's level."""
    level, instruction, _ = INSTRUCTIONS[name]
    kind = memref((WORDS,), "i32")

    def emit() -> None:
        with function("f", [Named(each, kind) for each in ("sums", "a", "b", "out")], private=False) as given_:
            loaded = [given_[each].load(WORDS, 0) for each in ("sums", "a", "b")]
            given_["out"].store(instruction(*loaded), 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "executed_as", lambda _: executed)
        return compile_text(text_of(emit), "f", level=level)


def run(name: str, executed: Level, *inputs: Tensor) -> Tensor:
    out = torch.full((WORDS,), -1, dtype=torch.int32)
    kernel_of(name, executed).function(4)(*(each.data_ptr() for each in (*inputs, out)))
    return out


@needs_mlir
@given(words, words, words, st.sampled_from([name for name in INSTRUCTIONS if name != "VDPBF16PS"]))
def test_integers_and_tables_have_the_bits_of_the_plain_form(sums: Tensor, a: Tensor, b: Tensor, name: str) -> None:
    level, _, plain = INSTRUCTIONS[name]
    for executed in {available_levels()[0], level} & set(available_levels()):
        assert torch.equal(run(name, executed, sums, a, b), plain(sums, a, b)), executed


@needs_mlir
@given(st.integers(0, 2**31))
def test_pairs_of_bfloat16_are_summed_in_float32(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sums = torch.randint(-99, 99, (WORDS,), generator=generator, dtype=torch.int32)
    a, b = (torch.randn(2 * WORDS, generator=generator).bfloat16().view(torch.int32) for _ in range(2))
    level, _, plain = INSTRUCTIONS["VDPBF16PS"]
    for executed in {available_levels()[0], level} & set(available_levels()):
        found = run("VDPBF16PS", executed, sums, a, b).view(torch.float32).double()
        assert (found - plain(sums, a, b)).abs().max() < 1e-4, executed
