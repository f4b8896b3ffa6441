from __future__ import annotations

import math

import torch

import compiled_kernels
from compiled_kernels.blocked import from_panels, to_panels
from compiled_kernels.cases import Case, CaseCost, Suite, random_normal
from compiled_kernels.linear.api import linear_reference
from compiled_kernels.linear.quantize import dequantize_int4, dequantize_int8, quantize_int4, quantize_int8

# (rows, width, out): one row and 16 through the matrices of SmolLM2 and TinyLlama; many rows; ragged ones.
DECODE = [(1, 576, 3072), (1, 2048, 11264), (1, 5632, 2048), (16, 576, 3072), (16, 2048, 2048)]
PREFILL = [(512, 576, 3072)]
PANELS = [(1, 576, 3072), (16, 576, 3072), (512, 576, 3072), (4, 96, 128), (6, 352, 64), (7, 64, 64), (385, 704, 192)]
SMALL = [(1, 64, 40), (2, 64, 40), (3, 128, 7), (5, 192, 33), (33, 64, 17)]


def dense_inputs(
    generator: torch.Generator, tokens: int, width: int, out: int, dtype: torch.dtype, bias: bool, panels: bool = False
) -> tuple:
    weight = random_normal(generator, dtype, (out, width)) * width**-0.5
    return (
        random_normal(generator, dtype, (tokens, width)),
        to_panels(weight) if panels else weight,
        random_normal(generator, dtype, (out,)) if bias else None,
    )


def int8_inputs(
    generator: torch.Generator, tokens: int, width: int, out: int, dtype: torch.dtype, bias: bool, panels: bool = False
) -> tuple:
    x, weight, added = dense_inputs(generator, tokens, width, out, dtype, bias)
    values, scales = quantize_int8(weight)
    return x, to_panels(values) if panels else values, scales, added


def int4_inputs(
    generator: torch.Generator, tokens: int, width: int, out: int, dtype: torch.dtype, bias: bool, group: int
) -> tuple:
    x, weight, added = dense_inputs(generator, tokens, width, out, dtype, bias)
    return x, *quantize_int4(weight, group), added


def cases(bits: int, **more: int) -> tuple[Case, ...]:
    """Make the cases; `bits` 0 means those of `dtype`; `more` is the group of INT4. Without one, weights in panels
    too."""
    found = []
    plain = [(*shape, False) for shape in DECODE + PREFILL + SMALL]
    for tokens, width, out, panels in plain + ([] if more else [(*shape, True) for shape in PANELS]):
        for dtype in (torch.float32, torch.bfloat16):
            each = bits or 8 * dtype.itemsize
            scales = out * 4 * (bits == 8) + (2 * out * width // more["group"] if more else 0)
            rows = tokens * (width + out) * dtype.itemsize
            found.append(
                Case(
                    f"{tokens}x{width}x{out}" + (f" group {more['group']}" if more else " panels" if panels else ""),
                    {"tokens": tokens, "width": width, "out": out, "dtype": dtype, "bias": out % 2 == 1 or panels}
                    | more
                    | ({"panels": True} if panels else {}),
                    CaseCost(out * width * each // 8 + scales + rows, 2 * tokens * width * out),
                    timed=width > 500 and dtype == torch.bfloat16,
                )
            )
    return tuple(found)


def terms(width: int, **_: object) -> float:
    return 4 + math.sqrt(width)


def _size(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the typical size of a sum of products of either sign: the root of the sum of their squares; of a row of
    outputs the largest."""
    squares = linear_reference(x.double().square(), weight.square(), None if bias is None else bias.double().square())
    return squares.sqrt().amax(-1, keepdim=True)


def _dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple:
    return x, from_panels(weight).double(), bias


def _int8(x: torch.Tensor, stored: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> tuple:
    return x, dequantize_int8(from_panels(stored), scales.double()), bias


def _int4(x: torch.Tensor, stored: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> tuple:
    return x, dequantize_int4(stored, scales.double()), bias


def _exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear_reference(x.double(), weight, None if bias is None else bias.double())


SUITES = (
    Suite(
        "linear", dense_inputs, compiled_kernels.linear, cases(0), terms,
        exact=lambda *inputs: _exact(*_dense(*inputs)), scale=lambda *inputs: _size(*_dense(*inputs)),
    ),
    Suite(
        "linear_int8", int8_inputs, compiled_kernels.linear_int8, cases(8), terms,
        exact=lambda *inputs: _exact(*_int8(*inputs)), scale=lambda *inputs: _size(*_int8(*inputs)),
    ),
    Suite(
        "linear_int4", int4_inputs, compiled_kernels.linear_int4, cases(4, group=64) + cases(4, group=32), terms,
        exact=lambda *inputs: _exact(*_int4(*inputs)), scale=lambda *inputs: _size(*_int4(*inputs)),
    ),
)  # fmt: skip
