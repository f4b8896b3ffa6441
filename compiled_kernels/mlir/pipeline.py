"""The passes between the levels of MLIR, as text that MLIR's pass manager parses.

Levels, each lowered from by what follows it: `linalg` (on tensors), `bufferized` (linalg or scf on memrefs), `vector`
(vector, scf, memref, arith, math), `llvm`.
"""

# The stubs of these optional packages, where installed, do not list what they export.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
from __future__ import annotations

from typing import Any

from compiled_kernels.backends import BackendError
from compiled_kernels.level import Level

TO_LINALG = "torchdynamo-export-to-torch-backend-pipeline,torch-backend-to-linalg-on-tensors-backend-pipeline"
NAMELESS = "func.func(linalg-generalize-named-ops,linalg-fold-unit-extent-dims,canonicalize,cse)"
FUSE = (
    "func.func(linalg-fuse-elementwise-ops,linalg-fold-unit-extent-dims,canonicalize,cse,linalg-fuse-elementwise-ops,"
    "canonicalize,cse)"
)
# Powers as products before the fast-math flags are set, so that they fuse with the additions around them.
SIMPLER_MATH = "func.func(math-expand-ops{ops=fpowi,rsqrt})"
# Results are arguments already (see rewrites.py), so nothing is allocated but what lies between two loops.
BUFFERIZE = (
    "eliminate-empty-tensors,one-shot-bufferize{bufferize-function-boundaries=1 function-boundary-type-conversion=identity-layout-map},"
    "canonicalize,cse,drop-equivalent-buffer-results{modify-public-functions=1},func.func(buffer-loop-hoisting),"
    "buffer-deallocation-pipeline,canonicalize,cse"
)
LOOPS = "convert-bufferization-to-memref,func.func(scf-forall-to-for,convert-linalg-to-loops,promote-buffers-to-stack)"


def run_pipeline(module: Any, text: str) -> None:
    """Run a pass pipeline on `module`, in place; raises BackendError with MLIR's message."""
    from torch_mlir.ir import Location, MLIRError
    from torch_mlir.passmanager import PassManager

    with module.context, Location.unknown():
        try:
            PassManager.parse(f"builtin.module({text})").run(module.operation)
        except MLIRError as error:
            raise BackendError(f"mlir: {' '.join(str(error).split())[:600]}") from None


def passes_to_llvm(lowered_from: str, level: Level) -> str:
    """Return the pipeline from `lowered_from` (`bufferized` or `vector`) down to the LLVM dialect, for `level`."""
    if lowered_from not in ("bufferized", "vector"):
        raise ValueError(f"no pass pipeline lowers from {lowered_from!r}; known here: bufferized, vector")
    return f"{LOOPS},{_to_llvm(level)}" if lowered_from == "bufferized" else _to_llvm(level)


# Arithmetic on bfloat16 is float32's, rounded: LLVM would round by calling a library where there is no instruction.
IN_FLOAT32 = "func.func(arith-emulate-unsupported-floats{source-types=bf16 target-type=f32})"


def _to_llvm(level: Level) -> str:
    rounded = "" if level is Level.V4_BF16 else "{include-bf16=true}"  # in integers: nearest even, NaN kept
    return (
        "canonicalize,cse,convert-vector-to-scf,lower-affine,expand-strided-metadata,lower-affine,convert-scf-to-cf,"
        f"{IN_FLOAT32},arith-expand{rounded},func.func(math-expand-ops{{ops=rsqrt,exp2f,fpowi}}),"
        "convert-vector-to-llvm{reassociate-fp-reductions=1},convert-math-to-llvm,convert-math-to-libm,"
        "finalize-memref-to-llvm,convert-arith-to-llvm,convert-index-to-llvm,"
        "convert-func-to-llvm{use-bare-ptr-memref-call-conv=1},convert-cf-to-llvm,convert-ub-to-llvm,"
        "reconcile-unrealized-casts"
    )
