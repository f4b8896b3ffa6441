"""Limits of the operators of each backend, whichever program calls them."""

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
    "user-defined cache codec of groups of tokens": ("quantized_attention", "decode dense float32"),  # at each step
    "quantized keys with dense values, or the other way": ("quantized_attention", "dense keys"),
}
# Of every backend that compiles; then of those with kernels of our own.
COMPILED = {
    "trees of drafts": "its attention has no mask within a span; backend eager carries trees out",
    "unlike numbers of tokens kept by heads":
        "its attention reads as many tokens of each head; backend eager carries this out",
    "residual streams": "it takes one stream; backend eager carries these models out",
    "recurrent layers": "it has no recurrence; backend eager carries these models out",
}  # fmt: skip
KERNELS = {
    **COMPILED,
    "custom part that is no arithmetic on positions": "it is part of a kernel as scalar code",
    "gates other than SiLU, GELU by its tanh, clamped": NO_KERNEL,
    "LayerNorm": NO_KERNEL,
}
OUTSIDE_ATTENTION = {
    "INT8 activations", "gates other than SiLU, GELU by its tanh, clamped", "LayerNorm",
    "weights in groups of no power of two", "experts in groups of no power of two",
    *(f"{name.upper()} weights" for name in WORDS),
}  # fmt: skip


def limits_of_backend(backend: Backend) -> dict[str, str]:
    """Return what no program of a backend carries out: types, known gaps, several ranks, and batch invariance."""
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
    """Return those limits that attention alone has."""
    return Supports({feature: reason for feature, reason in limits.items() if feature not in OUTSIDE_ATTENTION})


triton_supports = Supports({
    **limits_of_backend(Backend.TRITON), **KERNELS,
    "a CPU": "its kernels run on CUDA devices (TRITON_INTERPRET=1: in an interpreter)",
    "other devices": "its kernels run on CUDA devices",
    "weights in groups of no power of two": POWER_OF_TWO,
    "experts in groups of no power of two": POWER_OF_TWO,
})  # fmt: skip
MLIR = {
    **limits_of_backend(Backend.MLIR), **KERNELS,
    "a CUDA device": ON_CPU,
    "other devices": ON_CPU,
    "a cache in another type than the weights": "it reads both in one type",
    "experts in groups of no multiple of 4": "a word of a panel is of one group",
}  # fmt: skip
mlir_supports = Supports({
    **MLIR,
    "batch_invariant": f"paged_attention: {batch_variance('paged_attention', Backend.MLIR)}; its whole step keeps it",
})  # fmt: skip
