from __future__ import annotations

import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels.blocked import from_panels, to_panels
from compiled_kernels.cases import Case, CaseCost, Suite, random_normal
from compiled_kernels.linear.api import linear_reference
from compiled_kernels.linear.quantize import quantize_int8
from compiled_kernels.linear_w8a8.api import quantize_rows

# (rows, width, out): decode and prefill through matrices of SmolLM2 and TinyLlama; ragged ones, of each kind of word.
ROWS = [(1, 576, 3072), (1, 2048, 11264), (1, 5632, 2048), (16, 576, 3072)]
SMALL = [(1, 64, 40), (2, 96, 40), (3, 128, 7), (5, 33, 12), (33, 72, 17)]
PANELS = [*ROWS, (512, 576, 3072), (4, 96, 128), (6, 352, 64), (7, 64, 64), (385, 704, 192)]


def inputs(
    generator: torch.Generator, tokens: int, width: int, out: int, dtype: torch.dtype, bias: bool, panels: bool = False
) -> tuple:
    """Rows of very different sizes, as activations are; the second of zeros."""
    sizes = 10 ** torch.empty(tokens, 1).uniform_(-3, 3, generator=generator)
    x = (random_normal(generator, torch.float32, (tokens, width)) * sizes).to(dtype)
    x[1:2] = 0
    values, scales = quantize_int8(random_normal(generator, torch.float32, (out, width)) * width**-0.5)
    added = random_normal(generator, dtype, (out,)) if bias else None
    return x, to_panels(values) if panels else values, scales, added


def cases() -> tuple[Case, ...]:
    found = []
    shapes = [(*shape, False) for shape in ROWS + SMALL] + [(*shape, True) for shape in PANELS]
    for tokens, width, out, panels in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            moved = out * width + 4 * out + tokens * (width + out) * dtype.itemsize
            found.append(
                Case(
                    f"{tokens}x{width}x{out}" + (" panels" if panels else ""),
                    {"tokens": tokens, "width": width, "out": out, "dtype": dtype, "bias": out % 2 == 1 or panels}
                    | ({"panels": True} if panels else {}),
                    CaseCost(moved, 2 * tokens * width * out),
                    timed=width > 500 and dtype == torch.bfloat16,
                )
            )
    return tuple(found)


def terms(**_: object) -> float:
    """Sums are exact: what rounds is their way to float32, two scales, and the bias."""
    return 4


def exact(x: Tensor, stored: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """The rows' INT8 values and scales are what the rule makes of `x` as it is; all that follows is in float64."""
    rows, row_scales = quantize_rows(x)
    out = (
        linear_reference(rows.double(), from_panels(stored).double(), None)
        * row_scales.double()[:, None]
        * scales.double()
    )
    return out if bias is None else out + bias.double()


SUITES = (Suite("linear_w8a8", inputs, compiled_kernels.linear_w8a8, cases(), terms, exact=exact),)
