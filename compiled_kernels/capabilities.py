"""Define the limits of the backends, each with its reason: unsupported dtypes and cases, and operators whose results
depend on the batch composition.

`check` verifies the table of gaps: if a backend passes a case that a gap lists, the check fails. The setting
`batch_invariant` is refused with the reason of a `BatchVariance`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from compiled_kernels.backends import Backend

# Model dtypes of the backends with their own kernels; the other backends support all dtypes.
DTYPES: dict[Backend, tuple[str, ...]] = {
    Backend.TRITON: ("float32", "bfloat16", "float16"),
    Backend.MLIR: ("float32", "bfloat16"),
}


@dataclass(frozen=True)
class Gap:
    """Cases of an operator that a backend does not support. `case` is a shell-style pattern of case names.
    `worked_around_in` is the file with a workaround, if there is one: the cases then give correct results, and a test
    of the gap itself shows that the workaround is still needed.
    """

    operator: str
    backend: Backend
    case: str
    reason: str
    worked_around_in: str = ""

    def covers(self, operator: str, backend: Backend, case: str) -> bool:
        return operator == self.operator and backend is self.backend and fnmatchcase(case, self.case)


BF16_DOTS = "Triton's interpreter multiplies bfloat16 as if its bits were integers: operands are float32 there"
INT8_ACTIVATIONS = "not written; INT8 activations run on eager, inductor and mlir"
DOTS = "compiled_kernels/triton_code/dots.py"

GAPS: tuple[Gap, ...] = (
    Gap("linear_quantized", Backend.TRITON, "*INT8 activations*", INT8_ACTIVATIONS),
    Gap("quantized_attention", Backend.MLIR, "*dense keys*", "keys and values are both read as integers, or neither"),
    Gap("quantized_attention", Backend.MLIR, "* dense [bf]*", "old tokens are read as codes, never decoded"),
    Gap("log_softmax", Backend.TRITON, "*", "fused with the top-k extraction: see top_logprobs"),
    Gap("top_logprobs", Backend.MLIR, "*", "selection has no vector form; log_softmax has"),
    Gap("linear_quantized", Backend.TRITON, "* bfloat16", BF16_DOTS, DOTS),
    Gap("expert_linear", Backend.TRITON, "* bfloat16", BF16_DOTS, DOTS),
    Gap("paged_attention", Backend.TRITON, "* bfloat16", BF16_DOTS, DOTS),
    Gap("quantized_attention", Backend.TRITON, "* bfloat16", BF16_DOTS, DOTS),
)


def known_gap(operator: str, backend: Backend, case: str) -> Gap | None:
    """Return the gap that lists a backend's case and has no workaround; None if there is none."""
    return next((gap for gap in GAPS if gap.covers(operator, backend, case) and not gap.worked_around_in), None)


@dataclass(frozen=True)
class BatchVariance:
    """An operator on a backend whose result rows depend, in their bits, on other rows of the batch; `reason` says
    why.
    """

    operator: str
    backend: Backend
    reason: str


BY_ROWS = "torch's matrix product chooses its kernel, and with it the order of its sums, by the number of rows"
VENDOR = "the vendor's matrix product chooses its kernel, and with it the order of its sums, by the number of rows"
ONE_ROW = "one row has a kernel of its own, and more rows split their width by how many tiles there are"
LOWERED = "compiled for each number of rows, with leave to regroup sums and to join them with products"
SPLIT = "walks over the context are split by how many programs there are"

BATCH_VARIANT: tuple[BatchVariance, ...] = (
    *(BatchVariance(name, Backend.EAGER, BY_ROWS) for name in ("linear", "linear_quantized", "expert_linear")),
    *(
        BatchVariance(name, Backend.EAGER, "torch cuts sums over the context by the shape of the whole span")
        for name in ("paged_attention", "quantized_attention")
    ),
    BatchVariance("rms_norm", Backend.EAGER, "torch cuts sums by the shape of the whole batch"),
    *(
        BatchVariance(name, Backend.INDUCTOR, f"one row is a multiply-reduce; of more rows {BY_ROWS}")
        for name in ("linear", "linear_quantized", "expert_linear")
    ),
    *(
        BatchVariance(
            name, Backend.INDUCTOR, "decodes and longer spans are different code, each with its own order of sums"
        )
        for name in ("paged_attention", "quantized_attention")
    ),
    BatchVariance("rms_norm", Backend.INDUCTOR, LOWERED),
    BatchVariance("linear", Backend.TRITON, VENDOR),
    BatchVariance("linear_quantized", Backend.TRITON, ONE_ROW),
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
    """Return the reason why a row's bits depend on the batch composition; None if they do not. The operator
    `decode_step` is a whole step.
    """
    if operator == "decode_step" and backend is not Backend.MLIR:
        return next(f"{row.operator}: {row.reason}" for row in BATCH_VARIANT if row.backend is backend)
    return next((row.reason for row in BATCH_VARIANT if (row.operator, row.backend) == (operator, backend)), None)
