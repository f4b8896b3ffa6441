"""List the operations that the torch.compile backend compiles: those that run as fast in generated loops as in a
library.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

POINTWISE = """
    add sub mul div neg abs reciprocal rsqrt sqrt square exp log pow sigmoid silu relu tanh gelu sin cos maximum
    minimum where clamp clamp_min clamp_max eq ne lt le gt ge logical_and logical_or logical_not bitwise_and
    bitwise_or bitwise_not _to_copy convert_element_type floor ceil round
"""
REDUCTIONS = "sum mean amax amin _softmax _log_softmax"
VIEWS = """
    view reshape _unsafe_view expand permute transpose t unsqueeze squeeze slice select split split_with_sizes detach
    alias
"""
COPIES = "cat clone"
LIBRARY = "mm addmm bmm baddbmm linear matmul convolution _scaled_dot_product_flash_attention_for_cpu"
COMPUTE, SHARING = frozenset(f"{POINTWISE} {REDUCTIONS}".split()), frozenset(VIEWS.split())
SUPPORTED = COMPUTE | SHARING | frozenset(COPIES.split())
PRODUCTS = frozenset(LIBRARY.split())
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)


def unsupported_reason(node: Node) -> str | None:
    """Return why an operation is not compiled; None if it is."""
    if node.target is operator.getitem:
        source = node.args[0]
        return unsupported_reason(source) if isinstance(source, Node) else "not a tensor"
    name = base_name(node.target)
    if name in PRODUCTS:
        return "a library computes products: generated loops are several times slower"
    if name not in SUPPORTED:
        return "not among the operations this backend lowers"
    for value in _tensors(node):
        if value.device.type != "cpu":
            return f"on {value.device}: kernels here run on the CPU"
        if value.dtype not in SUPPORTED_DTYPES:
            return f"{value.dtype} has no place in these kernels"
        if any(not isinstance(extent, int) for extent in value.shape):
            return "a size is symbolic: kernels here have static shapes (torch.compile(dynamic=False))"
        if value.numel() == 0:
            return "an empty tensor"
    return None


def computes(node: Node) -> bool:
    """Return whether a node computes new numbers rather than a view of old ones."""
    return base_name(node.target) in COMPUTE


def is_view(node: Node) -> bool:
    """Return whether a node's result shares memory with its input."""
    return node.target is operator.getitem or base_name(node.target) in SHARING


def base_name(target: Any) -> str:
    return target._schema.name.split("::")[-1] if isinstance(target, torch._ops.OpOverload) else str(target)


def _tensors(node: Node) -> list[Tensor]:
    values = [node.meta.get("val"), *(each.meta.get("val") for each in node.all_input_nodes)]
    flat = [each for value in values for each in (value if isinstance(value, (tuple, list)) else (value,))]
    return [each for each in flat if isinstance(each, Tensor)]
