"""Every kind of layer against the oracle: latent attention, gates, mixtures, norms after, rotaries by layer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import Backend, backend_problems
from compiled_kernels.result_cache import ResultCache
from tests.engine.kinds import dense_models, latent, mixtures
from tests.engine.tiny import Oracle, in_step, model_of, request, runner_of, spec_of, weights_of
from tests.engine.weight_formats import FORMATS
from tests.thorough import tries
from workbench.engine import naive
from workbench.engine.runner import generate
from workbench.errors import WorkbenchError
from workbench.executors.autotune import autotune_backend
from workbench.executors.capabilities import Requirements, unsupported
from workbench.executors.select import Backends
from workbench.kv_cache.store import DenseLayer
from workbench.model.attention_spec import MLASpec
from workbench.model.hf.weights import random_weights
from workbench.model.model_parameters import parameter_shapes
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ActivationSpec, LayerSpec, ModelSpec, MoESpec, NormSpec
from workbench.model.transformer import Transformer

LATENT = MLASpec(num_heads=3, kv_lora_rank=4, qk_rope_head_dim=4, qk_nope_head_dim=3, v_head_dim=5, q_lora_rank=3)
LATENTS = spec_of(LayerSpec(attention=LATENT, intermediate_size=12), LayerSpec(attention=LATENT, intermediate_size=12))
GEMMA = LayerSpec(
    attention=spec_of().layers[0].attention,
    intermediate_size=12,
    activation=ActivationSpec(kind="gelu_tanh"),
    norms="both",
)
MIXTURE = LayerSpec(
    attention=spec_of().layers[0].attention, intermediate_size=12, experts=MoESpec(num_experts=3, num_experts_per_tok=2)
)


def serve(model: Transformer, shuffle: random.Random, **settings) -> None:
    """A few requests, each row held against the oracle; pages in random order, chunks of random lengths."""
    size = shuffle.randint(1, 7)
    pages = -(-29 // size) + shuffle.randrange(12)
    orders = tuple(shuffle.sample(range(1, pages + 1), pages) for _ in model.spec.kv_cache_groups)
    runner = runner_of(
        model, max_num_seqs=shuffle.randint(1, 4), max_num_batched_tokens=shuffle.randint(1, 24), page_size=size,
        pages=pages, page_orders=orders, **settings,
    )  # fmt: skip
    oracle = Oracle(runner)
    generate(runner, [request(f"r{i}", shuffle.randint(1, 20), shuffle.randint(1, 9)) for i in range(3)])
    assert oracle.clear


@settings(max_examples=tries(30), deadline=None)
@given(dense_models, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.randoms(use_true_random=False))
def test_every_row_is_the_oracles(spec: ModelSpec, dtype: torch.dtype, shuffle: random.Random) -> None:
    serve(model_of(spec, shuffle.randrange(99), dtype=dtype), shuffle)


@settings(max_examples=tries(10), deadline=None)
@given(mixtures, st.randoms(use_true_random=False))
def test_every_row_of_a_mixture_is_the_oracles(spec: ModelSpec, shuffle: random.Random) -> None:
    serve(model_of(spec, shuffle.randrange(99), dtype=torch.float64), shuffle)


@settings(max_examples=tries(50), deadline=None)
@given(st.one_of(dense_models, mixtures))
def test_states_have_the_shapes_of_the_spec(spec: ModelSpec) -> None:
    state = random_weights(spec, torch.float32)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == parameter_shapes(spec)
    assert sum(tensor.numel() for tensor in state.values()) == spec.num_parameters
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec


@given(latent(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_token_of_latent_attention_leaves_one_head(attention: MLASpec, dtype: torch.dtype) -> None:
    model = model_of(spec_of(LayerSpec(attention=attention, intermediate_size=1)), dtype=dtype)
    store = runner_of(model).store
    assert store.bytes_per_token == (attention.kv_lora_rank + attention.qk_rope_head_dim) * dtype.itemsize
    (cache,) = store.layers
    assert isinstance(cache, DenseLayer) and store.bytes == store.expected_bytes == cache.keys.nbytes
    assert cache.values.data_ptr() == cache.keys.data_ptr()


def test_deepseek_v3_leaves_70_272_bytes_a_token() -> None:
    """61 layers of 512 + 64 numbers in bfloat16 (DeepSeek-V3, 2024)."""
    attention = MLASpec(
        num_heads=128, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, q_lora_rank=1536
    )
    assert 61 * attention.cache_values_per_token * 2 == 70_272
    assert attention.matrix_parameters(7168) == 187_105_280


@pytest.mark.parametrize("backend", [Backend.INDUCTOR, Backend.MLIR])
def test_lanes_agree_with_the_oracle(backend: Backend) -> None:
    """All that is new in one layer; float64, which is sure to choose the oracle's experts, where there is that."""
    if problem := backend_problems()[backend]:
        pytest.skip(f"backend {backend}: {problem}")
    experts, dtype = (None, torch.float32) if backend is Backend.MLIR else (MIXTURE.experts, torch.float64)
    kind = GEMMA.model_copy(update={"attention": LATENT, "experts": experts})
    model = model_of(spec_of(kind).model_copy(update={"norm": NormSpec(offset=1.0)}), backend=backend, dtype=dtype)
    runner = runner_of(model, max_num_batched_tokens=32)
    Oracle(runner)
    generate(runner, in_step(5, 19, 2))


@pytest.mark.parametrize(
    "format",
    [
        WeightFormat.parse("int8"),
        WeightFormat.parse("int8", activations="int8"),
        WeightFormat.parse("int4", quant_group=2),
        FORMATS["fp8 by block"],
    ],
)
def test_quantized_weights_are_the_oracles(format: WeightFormat) -> None:
    attention = LATENT.model_copy(update={"q_lora_rank": 4, "v_head_dim": 2, "num_heads": 2})
    spec = spec_of(LayerSpec(attention=attention, intermediate_size=12), MIXTURE)
    # The oracle's dense weights are float32 by scales: in float64, products of integers, scaled later, are nearer.
    dtype = torch.float64 if format.activations == "float" else torch.float32
    model = Transformer.from_state(spec, weights_of(spec, dtype, 0), format=format)
    assert model.get_parameter("blocks.0.attention.up").dtype == dtype
    stack = model.get_parameter("blocks.1.feedforward.gate_up")
    assert stack.dtype == {"int4": torch.uint8, "int8": torch.int8, "dense": dtype}[format.expert_dtype]
    runner = runner_of(model)
    Oracle(runner)
    generate(runner, [request("a", 5, 6), request("b", 19, 4)])


REFUSED = [
    (LATENTS, "latent attention"),
    (spec_of(GEMMA), "activation kind='gelu_tanh'"),
    (spec_of(GEMMA.model_copy(update={"activation": ActivationSpec()})), "norms both"),
    (spec_of(MIXTURE), "experts"),
    (spec_of().model_copy(update={"norm": NormSpec(offset=1.0)}), "an offset"),
]


@pytest.mark.parametrize(("spec", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_the_compiled_step_lacks_is_refused_and_auto_takes_another(
    spec: ModelSpec, said: str, tmp_path: Path
) -> None:
    assert said in str(unsupported(Backend.MLIR, Requirements(spec), "step"))
    model = model_of(spec)
    alone = Backends(Backend.MLIR, Backend.EAGER, Backend.EAGER, "asked for")
    with pytest.raises(WorkbenchError, match="backend mlir: decodes no step of tiny: "):
        runner_of(model, backends=alone)
    if backend_problems()[Backend.MLIR] is None:
        backends = autotune_backend(alone, model, 4, remembered=ResultCache(tmp_path / "backends.json"))
        assert backends.decode is Backend.EAGER and said in backends.reason


def test_a_step_reads_only_the_experts_that_a_token_uses() -> None:
    model = model_of(spec_of(MIXTURE))
    every = sum(parameter.nbytes for parameter in model.parameters())
    assert every - model.weight_bytes == 3 * 8 * 12 * 4  # one of three experts, in float32


def test_naive_and_pages_differ_where_a_slot_is_ignored() -> None:
    """The oracle itself reads each new field: changing it changes the logits."""
    spec = spec_of(GEMMA, MIXTURE, LayerSpec(attention=LATENT, intermediate_size=12))
    ids, base = torch.arange(20), weights_of(spec, torch.float64, 0)
    plain = naive.logits(Transformer.from_state(spec, base), ids)

    def last(**update: object) -> dict[str, object]:
        return {"layers": (*spec.layers[:2], spec.layers[2].model_copy(update=update))}

    for update in (
        {"norm": NormSpec(offset=0.5)},
        {"embedding_scale": 2.0},
        {"final_logit_softcapping": 1.0},
        last(attention=LATENT.model_copy(update={"scale": 2.0})),
        last(attention=LATENT.model_copy(update={"sliding_window": 3})),
        last(attention=LATENT.model_copy(update={"rope_interleave": False})),
        last(activation=ActivationSpec(kind="clamped", limit=0.2)),
        last(parallel="two_norms"),
        {"logit_scale": 0.5},
    ):
        other = naive.logits(Transformer.from_state(spec.model_copy(update=update), base), ids)
        assert not torch.allclose(plain, other)


def test_latents_that_are_as_wide_and_parted_otherwise_have_tables_of_their_own() -> None:
    ways = (LATENT.model_copy(update={"kv_lora_rank": latent, "qk_rope_head_dim": 8 - latent}) for latent in (4, 6))
    model = model_of(spec_of(*(LayerSpec(attention=attention, intermediate_size=12) for attention in ways)))
    assert len(model.spec.kv_cache_groups) == 2
    assert model.logits([1, 2, 3]).shape == (3, model.spec.vocab_size)
    serve(model, random.Random(0))
