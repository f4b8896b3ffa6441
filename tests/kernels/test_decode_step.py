"""A compiled decode step is bound to exactly the tensors it names, each as it is declared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from compiled_kernels.builder.target import SIZE_BOUND, Target
from compiled_kernels.decode_step import DecodeStep, LayerShape, StepShape, WeightLayout
from compiled_kernels.decode_step.step import _read
from compiled_kernels.decode_step.text import step_inputs
from compiled_kernels.level import Level
from tests.helpers.refusals import kernel_refuses

DENSE, INT8 = WeightLayout("bf16", bias=True), WeightLayout("i8", panels=True)
INT4 = WeightLayout("i4", quant_group=8, panels=True)
LAYER = LayerShape(
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=8,
    scale=0.5,
    qkv=(DENSE,),
    output=INT8,
    gate_up=INT4,
    down=WeightLayout("bf16"),
)
SHAPE = StepShape(
    rows=1, hidden_size=8, vocab_size=16, eps=1e-5, dtype="bf16", layers=(LAYER,), head=INT8, page_size=4, max_pages=2,
    chunks=1, target=Target(Level.V3),
)  # fmt: skip
Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    found = {}
    for name, kind in step_inputs(SHAPE):
        sizes, types = _read(kind)
        sizes = tuple(3 if size == SIZE_BOUND else size for size in sizes)
        found[name] = torch.zeros(sizes, dtype=types[-1])
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda each: each.pop("down0_0"), "lacks down0_0 .1 of 1"),
        (lambda each: each.update(bias_0=torch.zeros(3)), "has no place for bias_0"),
        (lambda each: each.update(qkv0_0=torch.zeros(16, 8)), "qkv0_0 as .16, 8. bfloat16 .* .16, 8. float32"),
        (lambda each: each.update(output1_0=torch.zeros(7)), "output1_0 as .64. float32"),
        (lambda each: each.update(keys_0=each["keys_0"].mT.contiguous().mT), "keys_0 as .* not contiguous given"),
        (lambda each: each.update(values_0=torch.zeros(3, 2, 4, 4).bfloat16()), "values_0 as .3, 1, 4, 4."),
    ],
)
def test_other_tensors_are_refused_before_anything_is_compiled(
    change: Callable[[Tensors], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compiled_kernels.decode_step.step.compile_shape", None)
    wrong = tensors()
    change(wrong)
    kernel_refuses(f"decode step: .*{words}", DecodeStep, SHAPE, wrong)
    with pytest.raises(TypeError):  # the right ones come as far as the compiler
        DecodeStep(SHAPE, tensors())
