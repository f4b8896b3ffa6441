"""Define the passes between the levels of MLIR, as text that MLIR's pass manager parses, and the processor that LLVM
compiles for.

Levels, each lowered to the next: `linalg` (on tensors), `bufferized` (linalg or scf on memrefs), `vector` (vector, scf,
memref, arith, math), `llvm`. The level of the instruction set is written into the module of the LLVM dialect, so that
LLVM does not compile for the machine it runs on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from compiled_kernels.backends import BackendError
from compiled_kernels.level import Level

TO_LINALG = "torchdynamo-export-to-torch-backend-pipeline,torch-backend-to-linalg-on-tensors-backend-pipeline"
NAMELESS = "func.func(linalg-generalize-named-ops,linalg-fold-unit-extent-dims,canonicalize,cse)"
FUSE = (
    "func.func(linalg-fuse-elementwise-ops,linalg-fold-unit-extent-dims,canonicalize,cse,linalg-fuse-elementwise-ops,"
    "canonicalize,cse)"
)
# Powers become products before the fast-math flags are set, so that they fuse with adjacent additions.
SIMPLER_MATH = "func.func(math-expand-ops{ops=fpowi,rsqrt})"
# Results are already arguments (see rewrites.py), so only intermediate values between two loops are allocated.
BUFFERIZE = (
    "eliminate-empty-tensors,one-shot-bufferize{bufferize-function-boundaries=1 "
    "function-boundary-type-conversion=identity-layout-map},"
    "canonicalize,cse,drop-equivalent-buffer-results{modify-public-functions=1},func.func(buffer-loop-hoisting),"
    "buffer-deallocation-pipeline,canonicalize,cse"
)
# Layers of several kinds can have products of the same size: functions that differ only in their name are compiled
# once.
ONCE = "duplicate-function-elimination"
LOOPS = "convert-bufferization-to-memref,func.func(scf-forall-to-for,convert-linalg-to-loops,promote-buffers-to-stack)"
# Arithmetic on bfloat16 is done in float32 and rounded: LLVM would call a library function to round without an
# instruction for it.
IN_FLOAT32 = "func.func(arith-emulate-unsupported-floats{source-types=bf16 target-type=f32})"
PACKED_PREFIX = "packed_"
# The order of instructions that LLVM prefers, not the set it may use. Intel's names would make it prefer vectors of
# half the length.
TUNE_CPU = {Level.V3: "znver3"} | dict.fromkeys((Level.V4, Level.V4_VNNI, Level.V4_BF16), "znver4")


def run_pipeline(module: Any, text: str, verify: bool = True) -> None:
    """Run a pass pipeline on `module`, in place, and `verify` it after each pass; raises BackendError with MLIR's
    message."""
    from torch_mlir.ir import Location, MLIRError  # type: ignore[attr-defined] (not in its stubs)
    from torch_mlir.passmanager import PassManager  # type: ignore[attr-defined] (not in its stubs)

    with module.context, Location.unknown():
        try:
            passes = PassManager.parse(f"builtin.module({text})")
            passes.enable_verifier(verify)
            passes.run(module.operation)
        except MLIRError as error:
            raise BackendError(f"mlir: {' '.join(str(error).split())[:600]}") from None


def passes_to_llvm(lowered_from: str, level: Level) -> str:
    """Return the pipeline from `lowered_from` (`bufferized` or `vector`) down to the LLVM dialect, for `level`."""
    if lowered_from not in ("bufferized", "vector"):
        raise ValueError(f"no pass pipeline lowers from {lowered_from!r}; known here: bufferized, vector")
    return f"{LOOPS},{_to_llvm(level)}" if lowered_from == "bufferized" else _to_llvm(level)


def _to_llvm(level: Level) -> str:
    # in integers: round to nearest even, NaN preserved
    rounded = "" if level is Level.V4_BF16 else "{include-bf16=true}"
    return (
        "canonicalize,cse,convert-vector-to-scf,lower-affine,expand-strided-metadata,lower-affine,convert-scf-to-cf,"
        f"{IN_FLOAT32},arith-expand{rounded},func.func(math-expand-ops{{ops=rsqrt,exp2f,fpowi}}),"
        "convert-vector-to-llvm{reassociate-fp-reductions=1},convert-math-to-llvm,convert-math-to-libm,"
        "finalize-memref-to-llvm,convert-arith-to-llvm,convert-index-to-llvm,"
        "convert-func-to-llvm{use-bare-ptr-memref-call-conv=1},convert-cf-to-llvm,convert-ub-to-llvm,"
        "reconcile-unrealized-casts"
    )


class Processor(NamedTuple):
    """A processor in LLVM's terms: `cpu`, and `features` in addition to that CPU's, never empty, because LLVM would
    otherwise use the machine's own. `tuned` is the processor for which instructions are ordered."""

    cpu: str
    features: tuple[str, ...]
    tuned: str


def processor_of(level: Level) -> Processor:
    return Processor(level.llvm_cpu, level.llvm_features, TUNE_CPU[level])


def target_level(module: Any, processor: Processor) -> None:
    """Set `processor` on every function of `module`, in place, and add @packed_NAME(void **arguments) for every public
    function NAME: each argument is a pointer to its value.

    MLIR's execution engine adds such functions itself (`_mlir_NAME`), but for the machine it runs on: with many
    arguments they contain AVX-512 on a machine that has it. They are not called, and nothing may be inlined into them.
    """
    from torch_mlir.ir import Attribute, InsertionPoint, Module, StringAttr, UnitAttr  # type: ignore[attr-defined] (not in its stubs)

    features = ", ".join(f'"{each}"' for each in processor.features)
    with module.context:
        attributes = {
            "target_cpu": StringAttr.get(processor.cpu),
            "target_features": Attribute.parse(f"#llvm.target_features<[{features}]>"),
            "tune_cpu": StringAttr.get(processor.tuned),
        }
        functions = [op for op in module.body.operations if op.operation.name == "llvm.func" and op.regions[0].blocks]
        public = [op for op in functions if "sym_visibility" not in op.attributes]
        forms = [Module.parse(_packed(op)) for op in public]
        with InsertionPoint(module.body):
            packed = [form.body.operations[1].operation.clone() for form in forms]
        for op in (*functions, *packed):
            for name, value in attributes.items():
                op.attributes[name] = value
        for op in (*public, *packed):
            op.attributes["no_inline"] = UnitAttr.get()


def _packed(function: Any) -> str:
    """Return a module that declares `function` and defines its packed form."""
    name = str(function.attributes["sym_name"]).strip('"')
    kinds = [str(each.type) for each in function.regions[0].blocks[0].arguments]
    lines = []
    for i, kind in enumerate(kinds):
        lines += [
            f"%place{i} = llvm.getelementptr %arguments[{i}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr",
            f"%pointer{i} = llvm.load %place{i} : !llvm.ptr -> !llvm.ptr",
            f"%value{i} = llvm.load %pointer{i} : !llvm.ptr -> {kind}",
        ]
    given = ", ".join(f"%value{i}" for i in range(len(kinds)))
    call = f"llvm.call @{name}({given}) : ({', '.join(kinds)}) -> ()"
    declared = f"llvm.func @{name}({', '.join(kinds)})"
    head = f"llvm.func @{PACKED_PREFIX}{name}(%arguments: !llvm.ptr) {{"
    return "\n".join((declared, head, *lines, call, "llvm.return", "}"))
