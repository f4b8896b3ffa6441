"""Operators whose rows depend on the batch composition, by backend, with the reason: `batch_invariant` is refused with
it."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels.backends import Backend


@dataclass(frozen=True)
class BatchVariance:
    """The bits of a row of `operator`'s result on this backend depend on more than the row and its own context."""

    operator: str
    backend: Backend
    reason: str


BY_ROWS = "torch's matrix product chooses its kernel, and with it the order of its sums, by the number of rows"
VENDOR = "the vendor's matrix product chooses its kernel, and with it the order of its sums, by the number of rows"
ONE_ROW = "one row has a kernel of its own, and more rows split their width by how many tiles there are"
LOWERED = "compiled for each number of rows, with leave to regroup sums and to join them with products"
SPLIT = "walks over the context are split by how many programs there are"

BATCH_VARIANT: tuple[BatchVariance, ...] = (
    *(BatchVariance(name, Backend.EAGER, BY_ROWS) for name in ("linear", "linear_int8", "linear_int4", "expert_linear")),
    *(
        BatchVariance(name, Backend.EAGER, "torch cuts sums over the context by the shape of the whole span")
        for name in ("paged_attention", "quantized_attention")
    ),
    BatchVariance("rms_norm", Backend.EAGER, "torch cuts sums by the shape of the whole batch"),
    *(
        BatchVariance(name, Backend.INDUCTOR, f"one row is a multiply-reduce; of more rows {BY_ROWS}")
        for name in ("linear", "linear_int8", "linear_int4", "expert_linear")
    ),
    *(
        BatchVariance(name, Backend.INDUCTOR, "decodes and longer spans are different code, each with its own order of sums")
        for name in ("paged_attention", "quantized_attention")
    ),
    BatchVariance("rms_norm", Backend.INDUCTOR, LOWERED),
    BatchVariance("linear", Backend.TRITON, VENDOR),
    *(BatchVariance(name, Backend.TRITON, ONE_ROW) for name in ("linear_int8", "linear_int4")),
    *(BatchVariance(name, Backend.TRITON, SPLIT) for name in ("paged_attention", "quantized_attention")),
    *(
        BatchVariance(name, Backend.MLIR, "decodes and longer spans are different code, split by rows and threads")
        for name in ("paged_attention", "quantized_attention")
    ),
    *(
        BatchVariance(name, Backend.MLIR, LOWERED)
        for name in ("rms_norm", "rotary", "gated_silu", "gated_gelu", "gated_clamped", "log_softmax")
    ),
)


def batch_variance(operator: str, backend: Backend) -> str | None:
    """Return why a row's bits depend on the batch composition; None where they do not. The operator `decode_step` is a
    whole step."""
    if operator == "decode_step" and backend is not Backend.MLIR:
        return next(f"{row.operator}: {row.reason}" for row in BATCH_VARIANT if row.backend is backend)
    return next((row.reason for row in BATCH_VARIANT if (row.operator, row.backend) == (operator, backend)), None)
