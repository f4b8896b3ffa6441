"""The passes between the levels of MLIR, as text that MLIR's pass manager parses.

Levels, each lowered from by what follows it: `linalg` (on tensors), `bufferized` (linalg on memrefs), `vector`
(vector, scf, memref, arith, math), `llvm`.
"""

from __future__ import annotations

LEVELS = ("linalg", "bufferized", "vector", "llvm")

FUSE = (
    "func.func(linalg-generalize-named-ops,linalg-fuse-elementwise-ops,linalg-fold-unit-extent-dims,canonicalize,cse,"
    "linalg-fuse-elementwise-ops),eliminate-empty-tensors,canonicalize,cse"
)
BUFFERIZE = (
    "one-shot-bufferize{bufferize-function-boundaries=1 function-boundary-type-conversion=identity-layout-map},canonicalize,cse,"
    "buffer-results-to-out-params{hoist-static-allocs=1 modify-public-functions=1},buffer-deallocation-pipeline,"
    "canonicalize,cse"
)
LOOPS = "convert-bufferization-to-memref,func.func(convert-linalg-to-loops,promote-buffers-to-stack)"
TO_LLVM = (
    "canonicalize,cse,convert-vector-to-scf,lower-affine,expand-strided-metadata,lower-affine,convert-scf-to-cf,"
    "arith-expand,math-expand-ops{ops=rsqrt,exp2f,fpowi},convert-vector-to-llvm{reassociate-fp-reductions=1},"
    "convert-math-to-llvm,convert-math-to-libm,finalize-memref-to-llvm,convert-arith-to-llvm,convert-index-to-llvm,"
    "convert-func-to-llvm{use-bare-ptr-memref-call-conv=1},convert-cf-to-llvm,convert-ub-to-llvm,"
    "reconcile-unrealized-casts"
)


def passes_to_llvm(level: str) -> str:
    """The pipeline from `level` (`bufferized` or `vector`) down to the LLVM dialect."""
    if level not in ("bufferized", "vector"):
        raise ValueError(f"no pass pipeline lowers from {level!r}; known here: bufferized, vector")
    return f"{LOOPS},{TO_LLVM}" if level == "bufferized" else TO_LLVM
