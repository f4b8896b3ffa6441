"""Known gaps of the backends, with the reason beside each. `check` holds this table to the truth: a gap that has
closed fails it."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from compiled_kernels.lanes import Lane


@dataclass(frozen=True)
class Gap:
    """One gap: `case` is a pattern of case names, as in a shell. `worked_around_in` is the file that makes up for the
    gap, where one does: such a case is right all the same, and a test of the gap itself keeps the row."""

    operator: str
    lane: Lane
    case: str
    reason: str
    mended_in: str = ""

    def covers(self, operator: str, lane: Lane, case: str) -> bool:
        return operator == self.operator and lane is self.lane and fnmatchcase(case, self.case)


BF16_DOTS = "Triton's interpreter multiplies bfloat16 as if its bits were integers: operands are float32 there"
DOTS = "compiled_kernels/triton_code/dots.py"
NO_SCORES = "written by hand for scale, soft-cap and sink logits: score functions run on eager and inductor"
NO_MASKS = "written by hand for windows with sinks: other masks run on eager and inductor"

GAPS: tuple[Gap, ...] = (
    Gap("expert_linear", Lane.TRITON, "*", "not written: which experts are named decides the work, on the host so far"),
    Gap("expert_linear", Lane.MLIR, "*", "not written; lane auto runs mixtures through inductor"),
    Gap("linear_w8a8", Lane.TRITON, "*", "not written; INT8 activations run on eager, inductor and mlir"),
    Gap("quantized_attention", Lane.MLIR, "*dense keys*", "keys and values are both read as integers, or neither"),
    Gap("log_softmax", Lane.TRITON, "*", "fused with the top-k extraction: see top_logprobs"),
    *(Gap("paged_attention", lane, "*ALiBi*", NO_SCORES) for lane in (Lane.TRITON, Lane.MLIR)),
    *(Gap("paged_attention", lane, "*own mask*", NO_MASKS) for lane in (Lane.TRITON, Lane.MLIR)),
    Gap("top_logprobs", Lane.MLIR, "*", "selection has no vector form; log_softmax has"),
    Gap("linear_int8", Lane.TRITON, "* bfloat16", BF16_DOTS, DOTS),
    Gap("linear_int4", Lane.TRITON, "* bfloat16", BF16_DOTS, DOTS),
    Gap("paged_attention", Lane.TRITON, "* bfloat16", BF16_DOTS, DOTS),
    Gap("quantized_attention", Lane.TRITON, "* bfloat16", BF16_DOTS, DOTS),
)


def known_gap(operator: str, lane: Lane, case: str) -> Gap | None:
    """Return the gap that a case falls into on a backend, unless it is worked around."""
    return next((gap for gap in GAPS if gap.covers(operator, lane, case) and not gap.mended_in), None)
