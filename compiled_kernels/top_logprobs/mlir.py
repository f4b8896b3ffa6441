"""Log-softmax through torch-mlir. No schedule for vectors: LLVM's own vectorizer interleaves the sums better."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kernels.mlir.leaf import Leaf
from compiled_kernels.top_logprobs import reference

LOG_SOFTMAX = Leaf("log_softmax", reference.log_softmax)


def log_softmax(logits: Tensor) -> Tensor:
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    LOG_SOFTMAX.prepare((logits,))((logits,), (out,))
    return out
