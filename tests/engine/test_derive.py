"""Every number of a recorded pass is the sum of its terms, which are made of earlier stages and of weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from compiled_kernels import Backend
from tests.engine.tiny import layer, mixture_of, model_of, own_specs, spec_of
from tests.thorough import tries
from workbench.inspect.derive import derive
from workbench.inspect.forward_pass import BY_HEAD, record_forward_pass
from workbench.model.attention_spec import MLASpec, QKNormSpec
from workbench.model.spec import ActivationSpec, LayerSpec, ModelSpec, MoESpec, NormSpec, RouterSpec
from workbench.model.transformer import Transformer

LAYER_NORM = NormSpec(kind="layer", bias=True)
UNSEEN = "a key that this query does not see"
NOT_CHOSEN = "not among the chosen experts"
MLA = {"num_heads": 2, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6}


def with_norm(norm: NormSpec, *layers: LayerSpec) -> ModelSpec:
    return spec_of(*layers).model_copy(update={"norm": norm})


def mlp(**activation: Any) -> ModelSpec:
    """A model of one layer with this activation."""
    return spec_of(layer(2, 1, bias=True).model_copy(update={"activation": ActivationSpec(**activation)}))


def mla(**slots: Any) -> ModelSpec:
    return spec_of(LayerSpec(attention=MLASpec(**{**MLA, **slots}), intermediate_size=12))


def moe(activation: ActivationSpec | None = None, bias: bool = False, **slots: Any) -> ModelSpec:
    """A model of one mixture."""
    experts = MoESpec(**{"num_experts": 6, "num_experts_per_tok": 3, **slots})
    kind = layer(2, 1).model_copy(update={"experts": experts, "mlp_bias": bias})
    return spec_of(kind if activation is None else kind.model_copy(update={"activation": activation}))


KINDS = {
    "norms of heads": spec_of(layer(4, 2, qk_norm=True), layer(2, 2, qk_norm=QKNormSpec(after_rotary=True))),
    "norms over the projection": spec_of(
        layer(4, 2, qk_norm=QKNormSpec(over="projection")),
        layer(4, 2, qk_norm=QKNormSpec(over="projection", after_rotary=True)),
    ),
    "LayerNorms of each head": with_norm(
        LAYER_NORM,
        layer(4, 2, qk_norm=QKNormSpec(weight="per_head", bias=True)),
        layer(4, 2, qk_norm=QKNormSpec(weight="none", after_rotary=True)),
        layer(2, 1, qk_norm=QKNormSpec(bias=True, after_rotary=True), position="none"),
    ),
    "clipped": spec_of(layer(4, 2, qkv_clip=0.05), layer(2, 1, qkv_clip=0.4, qk_norm=True)),
    "normed values": spec_of(layer(4, 2, value_norm=True), layer(2, 1, value_norm=True, qkv_clip=0.5)),
    "partly rotated": spec_of(layer(2, 1, 8, rotated_columns=4)),
    "gated attention": spec_of(layer(4, 2, output_gate=True), layer(4, 1, output_gate=True, qk_norm=True)),
    "another layer's keys": spec_of(layer(4, 2, qk_norm=True), layer(4, 2, kv_shared_with=0)),
    "sinks and caps": spec_of(layer(4, 2, sink_logits=True, softcap=1.5), layer(2, 1, position="alibi")),
    "relu": mlp(kind="relu", gated=False),
    "relu2": mlp(kind="relu2", gated=False),
    "gelu": mlp(kind="gelu", gated=False),
    "xielu": mlp(kind="xielu", gated=False),
    "clamped": mlp(kind="clamped", limit=0.3),
    "sparse gates": mlp(kind="gelu_tanh", sparsity=0.6, gate_scale=2.0),
    "latents": mla(),
    "latents of queries": mla(q_lora_rank=6, qkv_bias=True, o_proj_bias=True, rope_interleave=False),
    "latents, capped in a window": mla(softcap=2.0, sliding_window=3),
    "experts": moe(),
    "experts of gpt-oss": moe(ActivationSpec(kind="clamped", limit=0.3), bias=True, router_bias=True),
    "experts by softmax": moe(router=RouterSpec(score="softmax", softmax_chosen=False, renormalize=True, factor=2.5)),
    "experts by softmax of softmax": moe(router=RouterSpec(score="softmax")),
    "experts by sigmoid": moe(
        router=RouterSpec(score="sigmoid", softmax_chosen=False, selection_bias=True, groups=3, kept_groups=2)
    ),
    "experts by sparsemixer": moe(router=RouterSpec(score="sparsemixer", jitter=0.3), num_experts_per_tok=2),
    "a shared expert": moe(shared_intermediate_size=10),
    "a shared expert with a gate": moe(shared_intermediate_size=10, shared_gate=True),
    "weighed inputs": moe(router=RouterSpec(score="sigmoid", softmax_chosen=False, weighs_input=True), bias=True),
    "wide experts": mixture_of(),
}  # fmt: skip


def assert_sums(model: Transformer, columns: int, tolerance: float = 1e-6) -> None:
    """Assert that numbers in up to `columns` columns of every stage, of an early token and a late one, add up."""
    found = record_forward_pass(model, (3, 1, 4, 1, 5))
    for stage in found.stages:
        step = max(1, stage.num_columns // columns)
        for row in (0, 3):
            for column in range(0, stage.num_columns, step):
                for head in range(len(stage.values) if stage.name in BY_HEAD else 1):
                    made = derive(found, stage, row, column, head)
                    where = stage, row, column, head, made
                    if made.formula in (UNSEEN, NOT_CHOSEN):
                        assert math.isnan(made.value) or made.value == 0, where
                        continue
                    assert made.terms and not made.note, where
                    assert all(len(term.factors) == len(made.factors) for term in made.terms), where
                    assert math.isclose(made.total, made.value, rel_tol=tolerance, abs_tol=tolerance), where


@pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS)
def test_every_number_is_the_sum_of_its_terms(spec: ModelSpec) -> None:
    assert_sums(model_of(spec, dtype=torch.float64), 12)


@settings(max_examples=tries(24))
@given(own_specs)
def test_it_is_so_for_any_layers(spec: ModelSpec) -> None:
    assert_sums(model_of(spec, dtype=torch.float64), 3)


@pytest.mark.parametrize("name", ["norms of heads", "gated attention", "latents", "a shared expert with a gate"])
def test_a_number_in_the_models_own_type_is_near(name: str) -> None:
    assert_sums(model_of(KINDS[name], dtype=torch.bfloat16), 3, tolerance=0.03)


def test_experts_in_panels_are_read_as_well() -> None:
    model = model_of(mixture_of(), backend=Backend.EAGER)
    assert model.use_code_panels()
    assert_sums(model, 2, tolerance=1e-4)


def test_largest_terms_come_first() -> None:
    found = record_forward_pass(model_of(spec_of(), dtype=torch.float64), (3, 1, 4))
    made = derive(found, found.stages[2], 1, 0)
    assert made.largest(2) == tuple(sorted(made.terms, key=lambda each: -abs(each.product))[:2])
