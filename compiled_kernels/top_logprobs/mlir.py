"""Log-softmax through torch-mlir. No schedule for vectors: LLVM's own vectorizer interleaves the sums better."""

from __future__ import annotations

from torch import Tensor

from compiled_kernels.mlir.leaf import LeafOperator
from compiled_kernels.top_logprobs import reference

LOG_SOFTMAX = LeafOperator("log_softmax", reference.log_softmax)


def log_softmax(logits: Tensor) -> Tensor:
    return LOG_SOFTMAX.prepare((logits,))(logits)
