"""The code shown of Inductor is the code that ran, and it accounts for every operation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compiled_kernels.backends import Backend
from compiled_kernels.cases import case_of, suite_of
from compiled_kernels.inductor_code import loaded_code, stages
from compiled_kernels.inductor_code.fusion import fusion, fusion_text
from compiled_kernels.inductor_code.stages import kernels
from compiled_kernels.inductor_code.watch import CompilationTrace, FusionLogHandler
from compiled_kernels.stage import CompilerStages
from tests.helpers.kernels import needs
from tests.helpers.refusals import kernel_refuses

needs_compiler = needs(Backend.INDUCTOR)
OPERATOR, CASE = "add_rms_norm", "3x70 float32"


@pytest.fixture(scope="module")
def plain() -> set[str]:
    """Return the kernels that a plain compilation of the case runs."""
    suite = suite_of(OPERATOR)
    before = set(loaded_code())

    def call(*inputs: torch.Tensor) -> object:
        return suite.call(*inputs, backend=Backend.INDUCTOR)

    with torch.inference_mode():
        torch.compile(call, fullgraph=True, dynamic=False)(*suite.make_inputs(case_of(suite, CASE)))
    return set(loaded_code()) - before


@pytest.fixture(scope="module")
def shown(plain: set[str]) -> CompilerStages:
    suite = suite_of(OPERATOR)
    return stages(suite, case_of(suite, CASE))


@needs_compiler
def test_the_artifact_is_the_one_that_a_plain_compilation_runs(shown: CompilerStages, plain: set[str]) -> None:
    assert {shown.artifact} == plain
    assert loaded_code()[shown.artifact].strip() == shown.stages["python"].text.strip()


@needs_compiler
def test_every_stage_is_there(shown: CompilerStages) -> None:
    assert list(shown.stages) == ["graph", "decomposed", "post_grad", "ir", "fused_ir", "fusion", "cpp", "python"]
    assert all(stage.text.strip() for stage in shown.stages.values())
    for name, source in shown.stages["cpp"].data.items():
        assert name in shown.stages["python"].text and source in shown.stages["cpp"].text


@needs_compiler
def test_fusion_accounts_for_every_node_and_every_pair_apart(shown: CompilerStages) -> None:
    data = shown.stages["fusion"].data
    nodes = {node["name"] for node in data["nodes"]}
    fused = [part for kernel in data["kernels"] for group in kernel["fused"] for part in group]
    assert nodes and sorted(fused) == sorted(nodes)  # each in one kernel, and in one only
    assert {kernel["kernel"] for kernel in data["kernels"]} == set(shown.stages["cpp"].data)
    assert all(kernel["bytes"] > 0 and kernel["operations"] for kernel in data["kernels"])
    groups = {"_".join(group) for kernel in data["kernels"] for group in kernel["fused"]}
    assert len(groups) > 1 and data["apart"]  # the sum is kept, so its loop stands alone
    for pair in data["apart"]:
        assert {pair["first"], pair["second"]} <= groups and pair["reason"]


@needs_compiler
def test_watching_leaves_no_trace(shown: CompilerStages) -> None:
    from torch._inductor import config, scheduler
    from torch._inductor.codegen.cpp import CppScheduling

    assert not config.trace.enabled and config._pre_fusion_custom_pass is None
    assert not [each for each in scheduler.fusion_log.handlers if isinstance(each, FusionLogHandler)]
    assert CppScheduling.define_kernel.__module__.startswith("torch.")


@needs_compiler
def test_an_operation_that_does_not_compile_is_reported_in_a_line() -> None:
    def call(*inputs: torch.Tensor, backend: Backend) -> torch.Tensor:
        return inputs[0] if bool(inputs[0].sum() > 0) else inputs[1]

    suite = replace(suite_of(OPERATOR), call=call)
    kernel_refuses(
        "add_rms_norm: 3x70 float32 does not compile to one graph: ", lambda: stages(suite, case_of(suite, CASE))
    )


def node(name: str, reads: list[str], writes: list[str], kind: str = "SchedulerNode") -> dict:
    parts = name.split("_")
    return {
        "name": name, "kind": kind, "parts": parts, "origins": [f"{part}_fx" for part in parts],
        "iteration": ["8"], "reads": reads, "writes": writes, "bytes": 64, "library": "",
    }  # fmt: skip


def test_reasons_are_those_of_the_groups_in_the_end() -> None:
    seen = CompilationTrace(
        nodes=[node("op0", ["x"], ["b0"]), node("op1", ["b0"], ["b1"]), node("op2", ["b1"], ["b2"])],
        groups=[node("op0_op1", ["x"], ["b1"]), node("op2", ["b1"], ["b2"]), node("op3", ["y"], ["b3"])],
        reasons=[("op0", "op1", "not yet"), ("op0", "op2", "in between"), ("op0_op1", "op2", "loops differ")],
        nodes_of_kernel={"k": ["op0", "op1"]},
    )
    found = fusion(seen)
    assert found["apart"] == [
        {"first": "op0_op1", "second": "op2", "shared": ["b1"], "reason": "op0 with op2: in between; loops differ"}
    ]
    assert [kernel["kernel"] for kernel in found["kernels"]] == ["k", "(no kernel)"]
    seen.reasons.clear()
    (pair,) = fusion(seen)["apart"]
    assert "logged no reason" in pair["reason"]
    assert "op0_op1 and op2 apart" in fusion_text(fusion(seen))


def test_kernels_are_read_from_the_module() -> None:
    code = (
        "a_0 = async_compile.cpp_pybinding(['float*'], r'''\nint kernel;\n''')\n"
        "b_1 = async_compile.triton('b_1', '''\n@triton.jit\n''', device_str='cuda')\n"
        "c = other.triton\nd = call(1)\n"
    )
    assert kernels(code) == {"cpp": {"a_0": "\nint kernel;\n"}, "triton": {"b_1": "\n@triton.jit\n"}}
