from __future__ import annotations

import math

import torch

import compiled_kernels
from compiled_kernels.blocked import from_panels, to_panels
from compiled_kernels.cases import Case, CaseCost, Suite, random_normal
from compiled_kernels.linear.api import linear_reference
from compiled_kernels.linear.matrix_format import WORDS, MatrixFormat
from compiled_kernels.linear.quantize import (
    dequantize_grouped,
    dequantize_int8,
    dequantize_matrix,
    quantize_int8,
    quantize_matrix,
)

# (rows, width, out): one row and 16 through the matrices of SmolLM2 and TinyLlama; many rows; ragged ones.
DECODE = [(1, 576, 3072), (1, 2048, 11264), (1, 5632, 2048), (16, 576, 3072), (16, 2048, 2048)]
PREFILL = [(512, 576, 3072)]
PANELS = [(1, 576, 3072), (16, 576, 3072), (512, 576, 3072), (4, 96, 128), (6, 352, 64), (7, 64, 64), (385, 704, 192)]
IN_WORDS = [(1, 256, 40), (2, 256, 40), (3, 512, 7), (5, 768, 33), (33, 256, 17), (1, 2048, 11264), (16, 2048, 2048)]
SMALL = [(1, 64, 40), (2, 64, 40), (3, 128, 7), (5, 192, 33), (33, 64, 17)]
# Formats in few bits beside INT8 by row, by what stores so: our INT4, Q4_0; AWQ and GPTQ; Q4_1; Q8_0; GPTQ in 8 bits;
# FP8 by block, and by row (its group is any number of columns from the width on).
GROUPED: dict[str, MatrixFormat] = {
    "int4 by 64": MatrixFormat("int4", 64, torch.float16),
    "int4 by 32": MatrixFormat("int4", 32, torch.float16),
    "int4 by 64, minima": MatrixFormat("int4", 64, torch.float16, torch.float32),
    "int4 by 32, minima": MatrixFormat("int4", 32, torch.float16, torch.float16),
    "int8 by 32": MatrixFormat("int8", 32, torch.float16),
    "int8 by 64, minima": MatrixFormat("int8", 64, torch.bfloat16, torch.float32),
    "fp8 by 128": MatrixFormat("fp8", 128, torch.float32),
    "fp8 by row": MatrixFormat("fp8", 1 << 16, torch.float32),
}


def dense_inputs(
    generator: torch.Generator, tokens: int, width: int, out: int, dtype: torch.dtype, bias: bool, panels: bool = False,
    weight_dtype: torch.dtype | None = None,
) -> tuple:  # fmt: skip
    weight = random_normal(generator, weight_dtype or dtype, (out, width)) * width**-0.5
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


def grouped_inputs(
    generator: torch.Generator, tokens: int, width: int, out: int, dtype: torch.dtype, bias: bool,
    codes: str = "int4", group: int = 64, scales: torch.dtype = torch.float16, minima: torch.dtype | None = None,
) -> tuple:  # fmt: skip
    x, weight, added = dense_inputs(generator, tokens, width, out, dtype, bias)
    if minima is not None:
        weight = weight + random_normal(generator, dtype, (out, 1)) * width**-0.5  # zeros in the middle would hide them
    stored = quantize_matrix(weight, MatrixFormat(codes, group, scales, minima))
    return x, *stored, *([] if len(stored) == 3 else [None]), added, min(group, width)


def words_inputs(
    generator: torch.Generator, tokens: int, width: int, out: int, dtype: torch.dtype, bias: bool, format: str
) -> tuple:
    x, weight, added = dense_inputs(generator, tokens, width, out, dtype, bias)
    weight = weight + random_normal(generator, dtype, (out, 1)) * width**-0.5
    stored = quantize_matrix(weight, MatrixFormat.named(format))
    return x, *stored, *([] if len(stored) == 3 else [None]), added, format


def cases(bits: int) -> tuple[Case, ...]:
    """Make the cases of INT8 by row, and with `bits` 0 those of dense weights; row by row, and in panels, of float16
    too."""
    found = []
    shapes = [(*shape, {}) for shape in DECODE + PREFILL + SMALL] + [(*shape, {"panels": True}) for shape in PANELS]
    if not bits:
        shapes += [(*shape, {"panels": True, "weight_dtype": torch.float16}) for shape in PANELS[:2]]
    for tokens, width, out, layout in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            bits_of_weight = bits or 8 * layout.get("weight_dtype", dtype).itemsize
            stored = out * width * bits_of_weight // 8 + out * 4 * (bits == 8)
            rows = tokens * (width + out) * dtype.itemsize
            found.append(
                Case(
                    f"{tokens}x{width}x{out}" + " float16" * ("weight_dtype" in layout) + " panels" * bool(layout),
                    {"tokens": tokens, "width": width, "out": out, "dtype": dtype, "bias": out % 2 == 1 or bool(layout)}
                    | layout,
                    CaseCost(stored + rows, 2 * tokens * width * out),
                    timed=width > 500 and dtype == torch.bfloat16,
                )
            )
    return tuple(found)


def grouped_cases() -> tuple[Case, ...]:
    """Make the cases of each format: all shapes of our own INT4, the small ones and a token's of the others."""
    found = []
    for name, format in GROUPED.items():
        ours = format.codes == "int4" and format.minima is None
        for tokens, width, out in (DECODE + PREFILL if ours else [DECODE[0], DECODE[3]]) + SMALL:
            for dtype in (torch.float32, torch.bfloat16):
                rows = tokens * (width + out) * dtype.itemsize
                stored = {"codes": format.codes, "group": format.group, "scales": format.scales}
                found.append(
                    Case(
                        f"{tokens}x{width}x{out} {name}",
                        {"tokens": tokens, "width": width, "out": out, "dtype": dtype, "bias": out % 2 == 1}
                        | stored | {"minima": format.minima},
                        CaseCost(format.nbytes(out, width) + rows, 2 * tokens * width * out),
                        timed=width > 500 and dtype == torch.bfloat16,
                    )
                )  # fmt: skip
    return tuple(found)


def words_cases() -> tuple[Case, ...]:
    """Make the cases of each format in words."""
    return tuple(
        Case(
            f"{tokens}x{width}x{out} {name}",
            {"tokens": tokens, "width": width, "out": out, "dtype": dtype, "bias": out % 2 == 1, "format": name},
            CaseCost(
                MatrixFormat.named(name).nbytes(out, width) + tokens * (width + out) * dtype.itemsize,
                2 * tokens * width * out,
            ),
            timed=width > 1000 and dtype == torch.bfloat16,
        )
        for name in WORDS
        for tokens, width, out in IN_WORDS
        for dtype in (torch.float32, torch.bfloat16)
    )


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


def _grouped(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None,
    bias: torch.Tensor | None, group: int,
) -> tuple:  # fmt: skip
    return x, dequantize_grouped(codes, scales.double(), None if minima is None else minima.double(), group), bias


def _words(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None,
    bias: torch.Tensor | None, format: str,
) -> tuple:  # fmt: skip
    found = MatrixFormat.named(format)
    scales = scales if scales.dtype == torch.uint8 else scales.double()
    exact = dequantize_matrix(found, from_panels(words), scales, None if minima is None else minima.double()).double()
    return x, exact, bias


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
        "linear_grouped", grouped_inputs, compiled_kernels.linear_grouped, grouped_cases(), terms,
        exact=lambda *inputs: _exact(*_grouped(*inputs)), scale=lambda *inputs: _size(*_grouped(*inputs)),
    ),
    Suite(
        "linear_quantized", words_inputs, compiled_kernels.linear_quantized, words_cases(), terms,
        exact=lambda *inputs: _exact(*_words(*inputs)), scale=lambda *inputs: _size(*_words(*inputs)),
    ),
)  # fmt: skip
