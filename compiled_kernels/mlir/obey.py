"""A module of the LLVM dialect made for one processor, so that LLVM obeys its name and not the machine."""

# The stubs of these optional packages, where installed, do not list what they export.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
from __future__ import annotations

from typing import Any, NamedTuple

from compiled_kernels.level import Level

PACKED_PREFIX = "packed_"
# How LLVM orders instructions, not which it takes. Intel's own names would make it prefer vectors of half the length.
TUNE_CPU = {Level.V3: "znver3"} | dict.fromkeys((Level.V4, Level.V4_VNNI, Level.V4_BF16), "znver4")


class Processor(NamedTuple):
    """A processor in LLVM's words; `features` beside those of `cpu`, never empty, or LLVM would take the machine's own.
    `tuned` says for which processor instructions are ordered."""

    cpu: str
    features: tuple[str, ...]
    tuned: str


def processor_of(level: Level) -> Processor:
    return Processor(level.llvm_cpu, level.llvm_features, TUNE_CPU[level])


def target_level(module: Any, processor: Processor) -> None:
    """Name `processor` on every function of `module`, in place, and add @packed_NAME(void **arguments) for
    every public function NAME: each argument is a pointer to its value.

    MLIR's execution engine adds such functions itself (`_mlir_NAME`), but for the machine: with many arguments they hold
    AVX-512 on a machine that has it. They are not called, and nothing may be inlined into them.
    """
    from torch_mlir.ir import Attribute, InsertionPoint, Module, StringAttr, UnitAttr

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
