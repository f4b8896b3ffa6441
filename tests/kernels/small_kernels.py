"""Small things to compile: a kernel of one multiplication, one that calls what is not there, a step of one layer."""

from __future__ import annotations

from pathlib import Path

import torch

from compiled_kernels.builder.target import SIZE_BOUND, Target
from compiled_kernels.decode_step import DecodeStep, LayerShape, StepShape, WeightLayout
from compiled_kernels.decode_step.step import allocate
from compiled_kernels.decode_step.text import step_inputs
from compiled_kernels.level import Level
from compiled_kernels.mlir import Kernel, compile, compile_shape

CALLS_MISSING_FUNCTION = """
func.func private @missing_function(f32) -> f32
func.func @f(%a: memref<1xf32>) {
  %zero = arith.constant 0 : index
  %x = memref.load %a[%zero] : memref<1xf32>
  %y = call @missing_function(%x) : (f32) -> f32
  memref.store %y, %a[%zero] : memref<1xf32>
  return
}
"""
SCALE = """
func.func @scale(%a: memref<16xf32>, %b: memref<16xf32>) {
  %zero = arith.constant 0 : index
  %none = arith.constant 0.0 : f32
  %factor = arith.constant dense<FACTOR> : vector<16xf32>
  %x = vector.transfer_read %a[%zero], %none {in_bounds = [true]} : memref<16xf32>, vector<16xf32>
  %y = arith.mulf %x, %factor : vector<16xf32>
  vector.transfer_write %y, %b[%zero] {in_bounds = [true]} : vector<16xf32>, memref<16xf32>
  return
}
func.func @negate(%a: memref<16xf32>) {
  %zero = arith.constant 0 : index
  %none = arith.constant 0.0 : f32
  %x = vector.transfer_read %a[%zero], %none {in_bounds = [true]} : memref<16xf32>, vector<16xf32>
  %y = arith.negf %x : vector<16xf32>
  vector.transfer_write %y, %a[%zero] {in_bounds = [true]} : vector<16xf32>, memref<16xf32>
  return
}
"""


def small_step(level: Level) -> DecodeStep:
    weight = WeightLayout("bf16")
    layer = LayerShape(
        num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, intermediate_size=128, qkv=(weight,), output=weight,
        gate_up=weight, down=weight,
    )  # fmt: skip
    shape = StepShape(
        rows=2, hidden_size=256, vocab_size=64, eps=1e-5, dtype="bf16", layers=(layer,), head=weight, page_size=16,
        max_pages=2, chunks=1, target=Target(level),
    )  # fmt: skip
    wanted = [each._replace(type=each.type.replace(f"<{SIZE_BOUND}x", "<3x")) for each in step_inputs(shape)]
    return DecodeStep(shape, allocate(wanted))


def compiled_scale(directory: Path, factor: float = 3.0) -> Kernel:
    """As another process would: nothing is remembered."""
    compile._compiled.cache_clear()
    compile_shape.cache_clear()
    return compile_shape(scale_text, factor, entry="scale", directory=directory)


def scale_text(factor: float) -> str:
    return SCALE.replace("FACTOR", str(factor))


def scales_by(kernel: Kernel, factor: float) -> bool:
    a, b = torch.randn(16), torch.full((16,), torch.nan)
    kernel.function(2)(a.data_ptr(), b.data_ptr())
    return torch.equal(b, a * factor)
