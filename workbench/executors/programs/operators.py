"""List the limits of each backend's operators, which do not depend on the program that calls them."""

from __future__ import annotations

from compiled_kernels import Backend
from compiled_kernels.capabilities import DTYPES, batch_variance, known_gap
from compiled_kernels.linear.matrix_format import WORDS
from workbench.executors.requirements import FLOATS, Supports

NO_KERNEL, ON_CPU, POWER_OF_TWO = (
    "it has no kernel for it", "its kernels run on the CPU", "a group is a power of two columns",
)  # fmt: skip
GAPS = {
    "INT8 activations": ("linear_quantized", "INT8 activations"),
    **{f"{name.upper()} weights": ("linear_quantized", f"1x256x40 {name} float32") for name in WORDS},
    "user-defined cache codec of groups of tokens": ("quantized_attention", "decode dense float32"),  # always checked
    "quantized keys with dense values, or the other way": ("quantized_attention", "dense keys"),
}
# Limits of every compiling backend; then of backends with kernels of this library.
COMPILED = {
    "trees of drafts": "its attention has no mask within a span; backend eager supports trees",
    "heads that keep different numbers of tokens":
        "its attention reads the same number of tokens for every head; backend eager supports this",
    "residual streams": "it takes one stream; backend eager supports these models",
    "recurrent layers": "it has no recurrence; backend eager supports these models",
}  # fmt: skip
KERNELS = {
    **COMPILED,
    "custom part that is not arithmetic on positions": "it is part of a kernel as scalar code",
    "gates other than SiLU, GELU by its tanh, clamped": NO_KERNEL,
    "LayerNorm": NO_KERNEL,
}
OUTSIDE_ATTENTION = {
    "INT8 activations", "gates other than SiLU, GELU by its tanh, clamped", "LayerNorm",
    "weights in groups that are not a power of two", "experts in groups that are not a power of two",
    *(f"{name.upper()} weights" for name in WORDS),
}  # fmt: skip


def limits_of_backend(backend: Backend) -> dict[str, str]:
    """Return the features that no program of a backend supports, with the reasons: types, known gaps, several ranks,
    batch invariance.
    """
    kinds = DTYPES.get(backend, FLOATS)
    gaps = {feature: known_gap(operator, backend, case) for feature, (operator, case) in GAPS.items()}
    variance = batch_variance("decode_step", backend)
    return {
        "trees of drafts on several ranks": "accepted tokens are moved in the pages of one process",
        "logits of early layers on several ranks": "each rank has the head for its own tokens",
        **({"batch_invariant": variance} if variance else {}),
        **{name: f"everything is computed in {', '.join(kinds[:-1])} or {kinds[-1]}"
           for name in FLOATS if name not in kinds},
        **{feature: gap.reason for feature, gap in gaps.items() if gap},
    }  # fmt: skip


def within_attention(limits: Supports) -> Supports:
    """Return the limits that concern attention."""
    return Supports({feature: reason for feature, reason in limits.items() if feature not in OUTSIDE_ATTENTION})


triton_supports = Supports({
    **limits_of_backend(Backend.TRITON), **KERNELS,
    "a CPU": "its kernels run on CUDA devices (TRITON_INTERPRET=1: in an interpreter)",
    "other devices": "its kernels run on CUDA devices",
    "weights in groups that are not a power of two": POWER_OF_TWO,
    "experts in groups that are not a power of two": POWER_OF_TWO,
})  # fmt: skip
MLIR = {
    **limits_of_backend(Backend.MLIR), **KERNELS,
    "a CUDA device": ON_CPU,
    "other devices": ON_CPU,
    "a cache with another dtype than the weights": "it reads both in one dtype",
    "experts in groups that are not a multiple of 4": "a word of a panel is of one group",
}  # fmt: skip
mlir_supports = Supports({
    **MLIR,
    "batch_invariant": f"paged_attention: {batch_variance('paged_attention', Backend.MLIR)}; its whole step keeps it",
})  # fmt: skip
