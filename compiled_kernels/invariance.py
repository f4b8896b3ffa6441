"""Operators whose rows depend on the batch composition, by backend, with the reason: `batch_invariant` is refused with
it."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels.lanes import Lane


@dataclass(frozen=True)
class Varies:
    """The bits of a row of `operator`'s result on this backend depend on more than the row and its own context."""

    operator: str
    lane: Lane
    reason: str


BY_ROWS = "torch's matrix product chooses its kernel, and with it the order of its sums, by the number of rows"
VENDOR = "the vendor's matrix product chooses its kernel, and with it the order of its sums, by the number of rows"
ONE_ROW = "one row has a kernel of its own, and more rows split their width by how many tiles there are"
LOWERED = "compiled for each number of rows, with leave to regroup sums and to join them with products"
SPLIT = "walks over the context are split by how many programs there are"

VARIES: tuple[Varies, ...] = (
    *(Varies(name, Lane.EAGER, BY_ROWS) for name in ("linear", "linear_int8", "linear_int4", "expert_linear")),
    *(
        Varies(name, Lane.EAGER, "torch cuts sums over the context by the shape of the whole span")
        for name in ("paged_attention", "quantized_attention")
    ),
    Varies("rms_norm", Lane.EAGER, "torch cuts sums by the shape of the whole batch"),
    *(
        Varies(name, Lane.INDUCTOR, f"one row is a multiply-reduce; of more rows {BY_ROWS}")
        for name in ("linear", "linear_int8", "linear_int4", "expert_linear")
    ),
    *(
        Varies(name, Lane.INDUCTOR, "decodes and longer spans are different code, each with its own order of sums")
        for name in ("paged_attention", "quantized_attention")
    ),
    Varies("rms_norm", Lane.INDUCTOR, LOWERED),
    Varies("linear", Lane.TRITON, VENDOR),
    *(Varies(name, Lane.TRITON, ONE_ROW) for name in ("linear_int8", "linear_int4")),
    *(Varies(name, Lane.TRITON, SPLIT) for name in ("paged_attention", "quantized_attention")),
    *(
        Varies(name, Lane.MLIR, "decodes and longer spans are different code, split by rows and threads")
        for name in ("paged_attention", "quantized_attention")
    ),
    *(
        Varies(name, Lane.MLIR, LOWERED)
        for name in ("rms_norm", "rotary", "gated_silu", "gated_gelu", "gated_clamped", "log_softmax")
    ),
)


def variance(operator: str, lane: Lane) -> str | None:
    """Return why a row's bits depend on the batch composition; None where they do not. The operator `decode_step` is a
    whole step."""
    if operator == "decode_step" and lane is not Lane.MLIR:
        return next(f"{row.operator}: {row.reason}" for row in VARIES if row.lane is lane)
    return next((row.reason for row in VARIES if (row.operator, row.lane) == (operator, lane)), None)
