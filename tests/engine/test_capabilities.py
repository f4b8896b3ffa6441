"""The table of what backends carry out: what it allows is computed and right, all else is refused with its reason.

A model runs on every backend that the table allows it, a decode and a prefill beside exact logits: a wrong yes fails
there, and a yes that no model shows is named. What Inductor compiles runs as written here: tests/laws and
test_compiled.py compile it. Draft steps in one call are test_draft_model.py's.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from compiled_kernels import Backend, backend_problems
from compiled_kernels.backends import triton_interpreted
from compiled_kernels.linear.matrix_format import DENSE_MATRIX, INT8_MATRIX, WORDS, MatrixFormat
from tests.engine.kinds import GEMMA, LATENT, MIXTURE
from tests.engine.tiny import HERE, layer, mixture_of, spec_of, weights_of
from tests.engine.weight_formats import FORMATS
from tests.patience import limit
from tests.thorough import THOROUGH
from workbench.engine import load, loaded_model
from workbench.errors import WorkbenchError
from workbench.executors import capabilities, requirements, select
from workbench.executors.build import build_step_runner
from workbench.executors.capabilities import COLUMNS, SUPPORTS, Role, limits_of, unsupported
from workbench.executors.reference import CacheLayout, reference_logits, single_decode_step
from workbench.executors.requirements import FEATURES, GELU, Requirements, Supports
from workbench.executors.select import Backends, select_backends
from workbench.kv_cache.format import CacheFormat
from workbench.model.attention_spec import QKNormSpec, QueryTemperature, RotaryConfig, RotaryScaling
from workbench.model.layers import Attention
from workbench.model.memory import cache_shapes
from workbench.model.quantized import Rows, WeightFormat
from workbench.model.recurrent.spec import ParallelRecurrentSpec, ShortConvSpec
from workbench.model.spec import ActivationSpec, AltUpSpec, LayerSpec, NormSpec
from workbench.model.transformer import Transformer
from workbench.request import CustomPart
from workbench.scheduler.plan import Span, StepPlan

PAGE_SIZE, CONTEXT = 8, 25
# A prefill over the end of a page, after others: code is compiled for eight rows at least, and for more takes longer;
# test-thorough has all rows.
PREFILL = CONTEXT if THOROUGH else 8
ME = "tests.engine.test_capabilities:"


class OwnAttention(Attention):
    """A user's attention module."""


def hidden(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A user's mask that no compiler sees through."""
    return key <= query if int(key.min()) >= 0 else key < query


def model(*layers: LayerSpec, weights: WeightFormat | None = None, cache: Any = None, **settings: Any) -> Requirements:
    dtype, tied = settings.pop("dtype", torch.float32), settings.pop("tied", True)
    cache_dtype = settings.pop("cache_dtype", None)
    spec = spec_of(*layers, tied=tied).model_copy(update=settings)
    specs = cache_shapes(spec, CacheFormat(**{"quant_group": 8, "columns": 8, "residual_length": 8, **(cache or {})}))
    return Requirements(spec, dtype, weights or WeightFormat(), specs, cache_dtype or dtype)


def broken_graph(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A user's mask of plain arithmetic that torch.compile cannot hold in one graph."""
    torch._dynamo.graph_break()
    return key <= query


def in_float64(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A user's mask that has no scalar form."""
    return key.double() <= query.double()


@dataclass(frozen=True)
class Bounded:
    """A user's choice of pages."""

    keep = 1
    page_size = PAGE_SIZE
    summaries = ("min", "max")

    def __call__(self, query: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return torch.maximum(query * low, query * high)


WIDE = layer(2, 1, dim=8).model_copy(update={"intermediate_size": 16})
WIDEST = layer(4, 2, dim=64).model_copy(update={"intermediate_size": 256})
IN_WORDS = {name: MatrixFormat.named(name) for name in WORDS}
MATRICES = {"attention.qkv": 512, "attention.output": 256, "feedforward.gate_up": 512, "feedforward.down": 256}
IN_TURN = tuple(
    (f"blocks.{index // 4}.{[*MATRICES][index % 4]}.weight", (([*MATRICES.values()][index % 4], format),))
    for index, format in enumerate(IN_WORDS.values())
)
STACKED: Rows = ((16, INT8_MATRIX), (8, DENSE_MATRIX), (8, INT8_MATRIX))
LAYERS = {"format": "int8", "layers": {1: {"format": "int4"}, 2: {"format": "fp8"}}}
MODELS: dict[str, Requirements] = {
    "attention": model(
        layer(4, 2, sliding_window=9, num_sink_tokens=2, softcap=1.5, qk_norm=True, sink_logits=True),
        layer(position="none"),
        final_logit_softcapping=3.0, embedding_scale=2.5,
    ),
    "latent": model(LayerSpec(attention=LATENT, intermediate_size=12), GEMMA, norm=NormSpec(offset=1.0)),
    "parts": model(
        layer(rotated_columns=2, qk_norm=QKNormSpec(weight="per_head")).model_copy(update={"parallel": "two_norms"}),
        layer().model_copy(update={"norms": "post"}),
    ),
    "states": model(LayerSpec(attention=ShortConvSpec(channels=6), intermediate_size=12), layer()),
    "both": model(layer().model_copy(update={"beside": ParallelRecurrentSpec(recurrent=ShortConvSpec(channels=6))})),
    "streams": model(
        layer(value_norm=True).model_copy(update={"norms": "both", "activation": ActivationSpec(sparsity=0.5)}),
        altup=AltUpSpec(streams=3, low_rank=2, input_columns=4, input_vocab_size=20),
    ),
    "partly rotated": model(layer(rotated_columns=2)),
    "both norms": model(layer().model_copy(update={"norms": "both", "activation": GELU}), norm=NormSpec(offset=1.0)),
    "clamped": model(layer().model_copy(update={"activation": ActivationSpec(kind="clamped")})),
    "GELU of experts": model(MIXTURE.model_copy(update={"activation": GELU})),
    "plain feed-forward": model(layer().model_copy(update={"activation": ActivationSpec(kind="relu2", gated=False)})),
    "LayerNorm": model(layer(), norm=NormSpec(kind="layer", weight=False)),
    "odd": model(layer(dim=3, position="none"), layer(module=CustomPart(path=ME + "OwnAttention"))),
    "mixture": model(MIXTURE),
    "wide mixture": model(*mixture_of(6, 2).layers, hidden_size=64),
    "experts by two": model(
        *mixture_of(6, 2).layers, hidden_size=64, weights=WeightFormat(experts=MatrixFormat("int8", 2, torch.float16))
    ),
    "experts by 24": model(
        mixture_of(6, 2).layers[0].model_copy(update={"intermediate_size": 192}), hidden_size=192,
        weights=WeightFormat(experts=MatrixFormat("int4", 24, torch.float16)),
    ),
    "own": model(
        layer(position="alibi"), layer(mask=CustomPart(path=HERE + "even"), score=CustomPart(path=HERE + "farther")),
    ),
    "by chunks": model(
        layer(chunk_size=7), layer(position="none", temperature=QueryTemperature(strength=0.5, floor=4)),
    ),
    "LongRoPE": model(layer(), rotary=RotaryConfig(scaling=RotaryScaling(
        kind="longrope", short_factors=(1, 2), long_factors=(2, 4), original_max_position_embeddings=8
    ))),
    "shared": model(layer(), layer(4, kv_shared_with=0)),
    "hidden": model(layer(mask=CustomPart(path=ME + "hidden"))),
    "in no one graph": model(layer(mask=CustomPart(path=ME + "broken_graph"))),
    "in float64": model(layer(mask=CustomPart(path=ME + "in_float64"))),
    "pages": model(layer(pages=CustomPart(path=ME + "Bounded")), layer()),
    "bfloat16": model(WIDE, dtype=torch.bfloat16),
    "float16": model(WIDE, dtype=torch.float16),
    "float64": model(WIDE, dtype=torch.float64),
    "INT8": model(WIDE, WIDE, WIDE, weights=WeightFormat.parse("int8"), cache=LAYERS),
    "INT8 activations": model(WIDE, weights=WeightFormat.parse("int8", activations="int8")),
    "INT4": model(WIDE, weights=WeightFormat.parse("int4", quant_group=8), cache={"format": "int4", "rotate": True}),
    "INT4 by 24": model(
        layer(2, 1, dim=12).model_copy(update={"intermediate_size": 24}), hidden_size=24,
        weights=WeightFormat.parse("int4", quant_group=24),
    ),
    **{name: model(WIDE, weights=format) for name, format in FORMATS.items()},
    # Compiled backends run only what shows something new: where this model is allowed, none of the next.
    "each matrix in words of its own": model(
        *[WIDEST] * -(-len(IN_WORDS) // 4), hidden_size=256, weights=WeightFormat(head=IN_WORDS["q6_k"], own=IN_TURN)
    ),
    **{name: model(WIDEST, weights=WeightFormat(own, own), hidden_size=256) for name, own in IN_WORDS.items()},
    "rows in several formats": model(WIDE, weights=WeightFormat(own=(("blocks.0.attention.qkv.weight", STACKED),))),
    "gate and up in two formats": model(
        WIDE, weights=WeightFormat(own=(("blocks.0.feedforward.gate_up.weight", STACKED),))
    ),
    "dense keys": model(WIDE, cache={"values": "int8"}),
    "own codec": model(WIDE, layer(sliding_window=9), cache={"codec": HERE + "Halved"}),
    "own codec of groups": model(WIDE, layer(sliding_window=9), cache={"codec": HERE + "HalvedGroups"}),
    "another cache": model(WIDE, dtype=torch.bfloat16, cache_dtype=torch.float32),
}  # fmt: skip
OTHERS = {  # what no model has: settings of a run, and of the machine
    "batch_invariant": Requirements(batch_invariant=True),  # tests/engine/test_invariant.py
    "logits of early layers": Requirements(early_layers=True),  # tests/engine/test_early_layers.py, as the next
    "logits of early layers on several ranks": Requirements(early_layers=True, ranks=2),
    "several ranks (tensor parallelism)": Requirements(
        ranks=2
    ),  # tests/tensor_parallel/test_shared_model.py, as the next three
    "mixture of experts on several ranks": replace(model(MIXTURE), ranks=2),
    "norms of a layer's parts on several ranks": replace(model(layer().model_copy(update={"norms": "both"})), ranks=2),
    "norms over all heads on several ranks": replace(
        model(layer(4, 2, qk_norm=QKNormSpec(over="projection"))), ranks=2
    ),
    "parallel attention and feed-forward on several ranks": replace(
        model(layer().model_copy(update={"parallel": "one_norm"})), ranks=2
    ),
    "trees of drafts": Requirements(tree_drafts=True),  # tests/speculative/test_trees.py, as the next two
    "trees of drafts over quantized or encoded keys, summaries of pages, or states": replace(
        model(WIDE, cache={"format": "int8"}), tree_drafts=True
    ),
    "trees of drafts on several ranks": Requirements(ranks=2, tree_drafts=True),
    "heads that keep different numbers of tokens": Requirements(uneven_heads=True),  # tests/zoo/test_eviction.py
    "a CPU": Requirements(),
    "a CUDA device": Requirements(device="cuda"),
    "other devices": Requirements(device="mps"),
}
# What cannot be shown: settings that do not exist yet.
UNSEEN = {"model settings that this table does not know", *OTHERS}


def agrees(wanted: Requirements, backend: Backend) -> None:
    """A decode and a prefill are as near exact logits as arithmetic in this precision is."""
    assert wanted.spec is not None and wanted.cache_dtype is not None
    made = Transformer.from_state(wanted.spec, weights_of(wanted.spec, wanted.dtype, 0), backend, wanted.weights)
    made.use_code_panels(backend is Backend.MLIR)
    held = CacheLayout(wanted.cache, PAGE_SIZE, wanted.cache_dtype)
    (store, decode), (own, _) = (single_decode_step(made, held, CONTEXT) for _ in range(2))
    executor = build_step_runner(made, own, Backends.uniform(backend, "asked for", wanted))
    sequence = decode.spans[0].sequence
    for plan in (decode, StepPlan(0, (Span(sequence, CONTEXT - PREFILL, PREFILL, True),))):
        exact, bound = reference_logits(made, store, plan)
        error = (executor.forward(plan).double() - exact).abs().max().item()
        assert error <= bound, f"{error} away from exact logits, {bound} is allowed"


@pytest.mark.timeout(limit(240))
@pytest.mark.parametrize("backend", Backend)
def test_what_the_table_allows_is_right(backend: Backend, as_written: None) -> None:
    if problem := backend_problems()[backend]:
        pytest.skip(f"backend {backend}: {problem}")
    columns: dict[str, Role] = {
        column: role for column, (other, role) in COLUMNS.items() if other is backend and role != "drafts"
    }
    shown: dict[str, set[str]] = {column: set() for column in columns}
    for name, wanted in MODELS.items():
        found = {each for each, feature in FEATURES.items() if feature.find(wanted) is not None}
        new = [column for column, role in columns.items()
               if not unsupported(backend, wanted, role) and found - shown[column]]  # fmt: skip
        slow = backend in (Backend.MLIR, Backend.TRITON)  # compiled, or interpreted, for a pair that laws have a row of
        if unsupported(backend, wanted) or slow and not (new or THOROUGH):
            continue
        try:
            agrees(wanted, backend)
        except Exception as error:
            raise AssertionError(f"the table allows {name!r} on backend {backend}") from error
        for column in new:
            shown[column] |= found
    for column in columns:
        allowed = {feature for feature in FEATURES if limits_of(feature)[column] is None}
        assert allowed - shown[column] - UNSEEN == set(), column


@pytest.mark.interpreter
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="pip install 'inference-workbench[triton]'")
@pytest.mark.skipif(triton_interpreted(), reason="it is what runs")
@pytest.mark.timeout(limit(240))
def test_what_the_table_allows_is_right_in_tritons_interpreter() -> None:
    test = f"{__file__}::test_what_the_table_allows_is_right[triton]"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--no-header", "-p", "no:cacheprovider", test],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert "1 passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name, backend", [
    (name, backend) for backend in Backend for name in SUPPORTS[backend]["blocks"] | SUPPORTS[backend]["drafts"]
])  # fmt: skip
def test_what_is_not_supported_is_refused_with_its_reason(
    name: str, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "backend_problems", lambda: dict.fromkeys(Backend))
    monkeypatch.setattr(requirements, "STEP_SETTINGS", set())  # so that every setting is a new one
    feature, own = FEATURES[name], SUPPORTS[backend]
    monkeypatch.setattr(requirements, "FEATURES", {name: feature})
    monkeypatch.setattr(
        capabilities, "SUPPORTS", dict.fromkeys(Backend, dict.fromkeys(own, Supports())) | {backend: own}
    )
    wanted = next(w for w in (*OTHERS.values(), *MODELS.values()) if feature.find(w) is not None)
    reasons = {role: limits[name] for role, limits in own.items() if name in limits}
    (reason,) = set(reasons.values())
    for role in own:
        assert str(unsupported(backend, wanted, role)).endswith(reasons.get(role, "None"))
    if [*reasons] == ["attention", "blocks"]:  # mlir's operators are no part of its batch-invariant step
        assert select_backends("mlir", wanted).decode is Backend.MLIR
    elif "blocks" in reasons:
        with pytest.raises(WorkbenchError, match=re.escape(reason)):
            select_backends(backend, wanted)
        assert select_backends("auto", wanted).blocks is not backend
    elif "step" in reasons:
        chosen = select_backends(backend, wanted)
        assert chosen.decodes_by_blocks and reason in chosen.reason
        assert select_backends("auto", wanted).decode is (Backend.INDUCTOR if wanted.ranks == 1 else Backend.EAGER)


def test_it_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "backend_problems", lambda: dict.fromkeys(Backend))
    monkeypatch.setattr(loaded_model, "random_weights", lambda *_: pytest.fail("weights are read"))
    refused: list[dict[str, Any]] = [
        {"attention": {"mask": {"path": ME + "hidden"}}}, {"cache": {"values": "int8"}}, {"dtype": "float16"},
    ]  # fmt: skip
    for settings in refused:
        with pytest.raises(WorkbenchError, match="backend 'mlir' does not support this"):
            load.load("shape:tiny", backend="mlir", **settings)


def test_many_masks_are_each_traced() -> None:
    """torch counts recompilations by code: the ninth mask of a process is traced as the first."""
    query = torch.arange(4)
    for number in range(12):

        class Mask:
            def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
                return key <= query

        Mask.__name__ = f"Mask{number}"
        assert requirements._trace_problem(Mask(), query[:, None], query[None]) is None
