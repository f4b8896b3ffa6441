"""Triton's kernels compiled for GPUs that are not here: what the compiler and the assembler make of each."""

from __future__ import annotations

import re

import pytest

from compiled_kernels.backends import triton_interpreted
from compiled_kernels.triton_code import TritonArtifact, artifacts, stages
from compiled_kernels.triton_code.examples import EXAMPLES
from tests.helpers.refusals import kernel_refuses

pytest.importorskip("triton", reason="pip install 'inference-workbench[triton]'")
pytestmark = pytest.mark.skipif(triton_interpreted(), reason="nothing is compiled under TRITON_INTERPRET=1: unset it")

SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes a block may have (CUDA C++ programming guide, compute capabilities)
REGISTERS = 65_536  # of a processor
KERNELS = {
    "rms_norm": {"norm_rows"},
    "add_rms_norm": {"norm_rows"},
    "rotary": {"turn"},
    "gated_silu": {"gate_times_up"},
    "gated_gelu": {"gate_times_up"},
    "gated_clamped": {"gate_times_up"},
    "kv_write": {"write_rows"},
    "linear": {"product"},
    "linear_quantized": {"one_row", "one_row_grouped", "one_row_words", "product", "add_parts"},
    "expert_linear": {"expert_product"},
    "paged_attention": {"attend", "merge"},
    "quantized_attention": {"attend_quantized", "merge"},
    "top_logprobs": {"survey", "gather"},
}
SPILLED = {"prefill int4: attend_quantized": 64}  # bytes; none elsewhere


def holds(artifact: TritonArtifact, sm: int) -> None:
    """Everything that is asked of a compiled kernel."""
    ptx = artifact.stages["ptx"]
    assert re.search(rf"^\.target sm_{sm}a?$", ptx, re.MULTILINE)
    assert artifact.cubin.startswith(b"\x7fELF") and all(artifact.stages.values())
    if sm == 90 or artifact.name.startswith(("decode", "batch")):  # the tiles of long spans are Hopper's
        assert artifact.spill_bytes <= SPILLED.get(artifact.name, 0), artifact.name
    assert artifact.shared_bytes <= SHARED[sm], artifact.name
    assert 0 < artifact.registers * 32 * artifact.num_warps <= REGISTERS, artifact.name
    if artifact.name.endswith((": attend", ": product")):
        assert "wgmma.mma_async" in ptx or "mma.sync" in ptx, artifact.name


def test_every_operator_of_the_backend_is_compiled() -> None:
    assert set(KERNELS) == set(EXAMPLES)


@pytest.mark.parametrize("operator", KERNELS)
def test_every_kernel_compiles_for_hopper(operator: str) -> None:
    made = artifacts(operator)
    assert {each.name.split(": ")[1] for each in made} == KERNELS[operator]
    for each in made:
        holds(each, 90)


@pytest.mark.parametrize("operator", ["linear_quantized", "paged_attention"])
def test_kernels_compile_for_ampere(operator: str) -> None:
    for each in artifacts(operator, sm=80):
        holds(each, 80)


def test_long_spans_and_many_rows_use_hoppers_own_matrix_instruction() -> None:
    for operator, kernel in (("paged_attention", "attend"), ("linear_quantized", "product")):
        made = [each for each in artifacts(operator) if each.name.startswith("prefill") and each.name.endswith(kernel)]
        assert made
        for prefill in made[:1] if operator == "paged_attention" else made:
            assert "wgmma.mma_async" in prefill.stages["ptx"], prefill.name


def test_decode_has_reads_under_way_while_it_computes() -> None:
    """Two tiles of keys and two of values in shared memory: what is not pipelined holds one of each."""
    (decode,) = [each for each in artifacts("paged_attention") if each.name == "decode: attend"]
    tile = 2 * decode.constexprs["TILE"] * decode.constexprs["DIM"]
    assert decode.shared_bytes >= 4 * tile
    assert 3 * decode.shared_bytes <= SHARED[90]  # what its split rule counts on


def test_stages_are_text_and_a_wrong_name_is_answered() -> None:
    text = stages("gated_silu")
    assert list(text) == ["source", "ttir", "ttgir", "llir", "ptx"]
    assert "def gate_times_up" in text["source"] and "tt.func" in text["ttir"] and ".visible .entry" in text["ptx"]
    assert "registers" in text["ptx"].splitlines()[0]
    kernel_refuses("gated_silu: backend triton has no stage 'sass'; known: source, ttir", lambda: text["sass"])
    kernel_refuses("log_softmax has no kernels in backend triton; known: rms_norm", stages, "log_softmax")
