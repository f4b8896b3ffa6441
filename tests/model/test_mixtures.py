"""A mixture of experts is the plain loop over tokens and their experts, with any router, on every backend and in either
layout of the weights; experts that no token chose are NaN and never show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels import Backend, backend_problems
from compiled_kernels.expert_linear.cases import spoil
from tests.model.packed_experts import FORMATS
from tests.thorough import THOROUGH, tries
from workbench.model.attention_spec import AttentionSpec
from workbench.model.feedforward import STACKS, MixtureOfExperts
from workbench.model.quantized import WeightFormat, named_parts, store_as
from workbench.model.spec import ActivationSpec, LayerSpec, MoESpec, RouterSpec
from workbench.oracle.naive import Weights
from workbench.oracle.naive import _mixture as plain_loop

HIDDEN, INTERMEDIATE, DENSE = 64, 32, WeightFormat()
BACKENDS = [each for each in (Backend.EAGER, Backend.INDUCTOR, Backend.MLIR) if backend_problems()[each] is None]


@st.composite
def routers(draw: st.DrawFn, groups: int) -> RouterSpec:
    return RouterSpec(
        score=draw(st.sampled_from(["logit", "softmax", "sigmoid"])),
        softmax_chosen=draw(st.booleans()),
        renormalize=draw(st.booleans()),
        selection_bias=draw(st.booleans()),
        groups=groups,
        kept_groups=draw(st.integers(1, groups)),
        group_score=draw(st.sampled_from(["max", "top2"])),
        factor=draw(st.sampled_from([1.0, 2.5])),
        weighs_input=draw(st.booleans()),
    )


@st.composite
def mixtures(draw: st.DrawFn) -> LayerSpec:
    groups, each = draw(st.sampled_from([(1, 1), (1, 5), (1, 8), (2, 4), (4, 2)]))
    router = draw(routers(groups))
    experts = MoESpec(
        num_experts=groups * each,
        num_experts_per_tok=draw(st.integers(1, router.kept_groups * each)),
        router=router,
        router_bias=draw(st.booleans()),
        shared_intermediate_size=draw(st.sampled_from([None, 48])),
        shared_gate=draw(st.booleans()),
    )
    return LayerSpec(
        attention=AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=HIDDEN),
        intermediate_size=INTERMEDIATE,
        mlp_bias=draw(st.booleans()),
        activation=ActivationSpec(kind=draw(st.sampled_from(["silu", "clamped", "gelu"]))),
        experts=experts,
    )


def filled(layer: LayerSpec, x: Tensor, one_takes_all: bool, seed: int) -> dict[str, Tensor]:
    """Weights in the type of x; those of experts that no row of x chooses are NaN."""
    assert layer.experts is not None
    torch.manual_seed(seed)
    part = MixtureOfExperts(layer, layer.experts, HIDDEN, Backend.EAGER, WeightFormat()).to(x.dtype)
    for parameter in part.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=x.dtype) * HIDDEN**-0.5
    if one_takes_all:
        part.router.weight.data[-1] = 0.2 * x.sum(0)  # others' softmax stays above zero in float32: no ties
    with torch.no_grad():
        used = part.router.choose(x)[1].flatten().tolist()
    for name in ("gate_up", "gate_up_bias", "down", "down_bias"):
        stack = getattr(part, name)
        if stack is not None:
            stack.data[[each for each in range(len(stack)) if each not in used]] = torch.nan
    return part.state_dict()


def built(
    layer: LayerSpec, state: dict[str, Tensor], backend: Backend, panels: bool, format: WeightFormat = DENSE
) -> MixtureOfExperts:
    assert layer.experts is not None
    with torch.device("meta"):
        part = MixtureOfExperts(layer, layer.experts, HIDDEN, backend, format)
    part.load_state_dict(state, assign=True)
    part.requires_grad_(False).use_panels(panels)
    return part


DRAWN = {
    "layer": mixtures(), "tokens": st.integers(1, 17), "takes_all": st.booleans(), "seed": st.integers(0, 99),
}  # fmt: skip


def exact_dtype(backend: Backend, panels: bool) -> torch.dtype:
    return torch.float32 if backend is Backend.MLIR or panels else torch.float64


def assert_plain_loop(ours: Tensor, plain: Tensor) -> None:
    assert ours.isfinite().all()
    torch.testing.assert_close(ours.double(), plain, rtol=1e-4, atol=1e-4 if ours.dtype is torch.float32 else 1e-9)


def check_router(backend: Backend, panels: bool, layer: LayerSpec, tokens: int, takes_all: bool, seed: int) -> None:
    """Held to float64, in float32 or float64 where the backend has that."""
    dtype = exact_dtype(backend, panels)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)
    state = filled(layer, x, takes_all, seed)
    weights = Weights({name: tensor.double() for name, tensor in state.items()})
    assert_plain_loop(built(layer, state, backend, panels)(x), plain_loop(x.double(), weights, "", layer))


def check_packed(
    backend: Backend, panels: bool, kind: str, layer: LayerSpec, tokens: int, takes_all: bool, seed: int
) -> None:
    """Scales of experts that no token chose are NaN."""
    format, dtype = FORMATS[kind], exact_dtype(backend, panels)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)
    dense = filled(layer, x, takes_all, seed)
    state, wide = dict(dense), {name: tensor.double() for name, tensor in dense.items()}
    for name in ("gate_up", "down"):
        stored = store_as(f".feedforward.{name}", tuple(dense[name].shape), format, [dense[name].nan_to_num()])
        minima = stored[2] if len(stored) == 3 else None
        spoil((stored[0], stored[1], minima), dense[name].isnan().flatten(1).any(1))
        state |= named_parts(name, stored)
    part = built(layer, state, backend, panels, format)
    wide |= {name: torch.stack([part.matrix(name, i) for i in range(len(dense[name]))]).double() for name in STACKS}
    assert_plain_loop(part(x), plain_loop(x.double(), Weights(wide), "", layer))
    dense_bytes = dense["gate_up"].nbytes + dense["down"].nbytes
    assert sum(each.nbytes for each in part.stacks) < dense_bytes * (0.33 if dtype is torch.float32 else 0.17)


@pytest.mark.parametrize("check", [check_router, check_packed])
@pytest.mark.parametrize("panels", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mixture_is_the_plain_loop(check: Callable[..., None], backend: Backend, panels: bool) -> None:
    """With experts in the model's type, and in few bits."""
    compiled = backend is not Backend.EAGER  # what is compiled is found again
    kinds = {"kind": st.sampled_from(sorted(FORMATS))} if check is check_packed else {}

    @settings(max_examples=tries(25), derandomize=compiled and not THOROUGH)
    @given(**kinds, **DRAWN)
    def law(**drawn: Any) -> None:
        check(backend, panels, **drawn)

    law()
