"""A step on any backend equals the oracle: every pair of layers, weights, cache, page size and backend.

To add a kind of layer, of weights or of cache, add a line to its table; the rows that pair it with all others follow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import Backend, backend_problems
from compiled_kernels.level import Level, current_level, limited_to
from tests.engine import own_rules
from tests.engine.kinds import GEMMA, LATENT, MIXTURE, WIDE
from tests.engine.tiny import (
    HERE,
    Oracle,
    in_eights,
    in_step,
    layer,
    mixture_of,
    request,
    runner_of,
    spec_of,
    specs,
    weights_of,
)
from tests.engine.weight_formats import FORMATS
from tests.helpers.recorded import rows_of
from tests.helpers.rows import Row, rows
from tests.patience import limit
from tests.thorough import THOROUGH, tries
from workbench.engine.runner import Runner, generate
from workbench.executors.build import CompileUnit
from workbench.executors.capabilities import unsupported
from workbench.executors.layout import choose_weight_layout
from workbench.executors.programs.prefill import weights_in_panels
from workbench.executors.reference import CacheLayout
from workbench.executors.requirements import Requirements
from workbench.executors.select import Backends
from workbench.kv_cache.format import CacheFormat
from workbench.model.attention_spec import QKNormSpec, RotaryConfig
from workbench.model.memory import cache_shapes
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ActivationSpec, ModelSpec, NormSpec
from workbench.model.transformer import Transformer
from workbench.request import CustomPart, Request


def own(part: str, **arguments: Any) -> CustomPart:
    return CustomPart(path=f"{own_rules.__name__}:{part}", arguments=arguments)


LAYERS: dict[str, ModelSpec] = {
    "windows": spec_of(
        layer(4, 2, bias=True, sliding_window=9, num_sink_tokens=3, softcap=1.5, sink_logits=True),
        layer(4, 2, bias=True, scale=0.3),
    ).model_copy(update={"final_logit_softcapping": 3.0, "embedding_scale": 2.5}),
    "norms": spec_of(layer(12, 4, 6, qk_norm=True), layer(4, 1, rotary=RotaryConfig(rope_theta=50.0), qk_norm=True),
                     layer(position="none", sliding_window=5)),
    "own rules": spec_of(
        layer(4, 2, position="alibi", mask=own("near_by_root")),
        layer(4, 2, mask=own("even"), score=own("farther"), sliding_window=30),
        *(layer(mask=own(name)) for name in ("near_by_logarithm", "near_before")),
    ),
    "chosen pages": spec_of(layer(4, 2, pages=own("Bounds", first=2, keep=1)), layer(pages=own("Bounds"))),
    "latent": spec_of(
        GEMMA.model_copy(update={"attention": LATENT.model_copy(update={"v_head_dim": 8, "q_lora_rank": 8})}),
        layer(4, 2, 6, qk_norm=QKNormSpec(after_rotary=True)), layer(4, 2, 6, kv_shared_with=1),
        layer().model_copy(update={"parallel": "two_norms"}),
    ).model_copy(update={"norm": NormSpec(offset=1.0)}),
    "wide": WIDE,
    "as Gemma": spec_of(layer(4, 2, 16, qk_norm=True, sliding_window=9), layer(4, 2, 16, qk_norm=True)).model_copy(
        update={"hidden_size": 64, "norm": NormSpec(offset=1.0), "embedding_scale": 8.0}
    ),
    "mixture": mixture_of(),
}  # fmt: skip
AS_GEMMA = {"norms": "both", "activation": ActivationSpec(kind="gelu_tanh"), "intermediate_size": 64}
LAYERS["as Gemma"] = LAYERS["as Gemma"].model_copy(
    update={"layers": tuple(each.model_copy(update=AS_GEMMA) for each in LAYERS["as Gemma"].layers)}
)
LAYERS = {name: in_eights(spec) for name, spec in LAYERS.items()}
WITHOUT_STEP = {"latent", "rotated", "codec"}  # what has no whole step of MLIR, and runs by its blocks
WEIGHTS: dict[str, tuple[torch.dtype, WeightFormat]] = {
    "float32": (torch.float32, WeightFormat()),
    "float64": (torch.float64, WeightFormat()),
    "bfloat16": (torch.bfloat16, WeightFormat()),
    "int8": (torch.bfloat16, WeightFormat.parse("int8")),
    "int8 rows": (torch.float32, WeightFormat.parse("int8", activations="int8")),
    # Of seventeen rows some have a number between two codes, and its last bit is worth a code.
    "int8 rows, bfloat16": (torch.bfloat16, WeightFormat.parse("int8", activations="int8")),
    "int4": (torch.float32, WeightFormat.parse("int4", "int8", 8)),
    **{name: (torch.float32, format) for name, format in FORMATS.items()},
}
CROSSED = "float32", "bfloat16", "int8", "int8 rows", "int4 with minima"  # with all layers and backends
PACKED = {"quant_group": 8, "columns": 8, "residual_length": 5}
CACHES: dict[str, dict[str, Any]] = {
    "dense": {},
    "int8, int4": {
        **PACKED, "keys": "int8", "values": "int4", "num_sink_tokens": 3, "layers": {1: {"format": "dense"}},
    },
    "fp8": {**PACKED, "format": "fp8"},
    "rotated": {**PACKED, "format": "int4", "rotate": True},
    "codec": {"codec": HERE + "Halved"},
}  # fmt: skip
BACKENDS = {  # and how a step on it runs
    "eager": Backend.EAGER,
    "inductor": Backend.INDUCTOR,  # as the Python that it compiles
    "auto": Backend.INDUCTOR,  # decodes by the compiled step of MLIR, prompts by Inductor with MLIR's attention
    "mlir": Backend.MLIR,  # prompts as rows of the compiled step
    "mlir, blocks": Backend.MLIR,  # prompts by its operators
    "mlir, panels": Backend.MLIR,  # prompts by compiled blocks over weights in panels
}
COMPILED_BACKENDS = "auto", "mlir", "mlir, blocks", "mlir, panels"
PAGE_SIZES = 8, 3, 48, 100  # the last two hold a whole context
# Rows of each backend that compiles: all share the decode step, which takes the most time, so that it is compiled once.
# Eager and Inductor have rows of all other pairs, and in test-thorough every backend has.
SETTINGS: list[Row] = [
    dict(zip(("layers", "weights", "page_size", "tied"), values, strict=True))
    for values in (
        ("windows", "int8 rows", 3, True), ("norms", "int8", 3, False), ("wide", "float32", 8, False),
        ("own rules", "int4 with minima", 3, True), ("chosen pages", "int8 rows", 8, True),
        ("mixture", "int8 rows", 48, True), ("as Gemma", "bfloat16", 48, False),
        ("latent", "int4 with minima", 100, False),
    )
]  # fmt: skip
PACKED_SETTINGS: list[Row] = [
    dict(zip(("cache", "layers", "weights", "page_size"), values, strict=True))
    for values in (
        ("int8, int4", "windows", "bfloat16", 8), ("int8, int4", "wide", "int8", 48), ("fp8", "wide", "float32", 48),
        ("rotated", "wide", "float32", 8), ("codec", "wide", "bfloat16", 48),
    )
]  # fmt: skip
# A prompt of exactly the step's budget and a page, one of pages and a token, one of a token less than the budget. First
# come, first served: each step with a prompt has eight tokens, and all end together, so little else is compiled for.
BUDGET = 8
REQUESTS = [request("budget", 8, 10), request("long", 41, 4), request("less", 7, 3)]


def possible(layers: str, weights: str, backend: str, page_size: int, cache: str = "dense", **_: Any) -> bool:
    """Return whether a row makes sense; that the product's table says so too is tested below."""
    by_step = not {layers, cache} & WITHOUT_STEP
    in_panels = by_step and layers in ("wide", "as Gemma") and weights in ("float32", "bfloat16", "int8", "int8 rows")
    by_auto = by_step and layers != "mixture"  # experts are in panels, and all blocks then on MLIR
    if layers == "chosen pages" and page_size != 8 or cache == "rotated" and layers == "windows":  # heads of 4 columns
        return False
    return {"auto": by_auto, "mlir, blocks": by_step, "mlir, panels": in_panels}.get(backend, True)


def on_compiled(settings: list[Row]) -> list[Row]:
    return [{**row, "backend": each} for row in settings for each in COMPILED_BACKENDS if possible(**row, backend=each)]


def is_cheap(backend: str, **row: Any) -> bool:
    return (THOROUGH or backend not in COMPILED_BACKENDS) and possible(backend=backend, **row)


def build(
    layers: str | ModelSpec, weights: str, cache: str, page_size: int, backend: str, tied: bool = True, **more: Any
) -> Runner:
    """Return a runner whose unwritten pages are NaN."""
    spec = (LAYERS[layers] if isinstance(layers, str) else layers).model_copy(update={"tie_word_embeddings": tied})
    chosen, (dtype, format) = BACKENDS[backend], WEIGHTS[weights]
    model = Transformer.from_state(spec, weights_of(spec, dtype, 5), chosen, format)
    model.use_code_panels(chosen is Backend.MLIR)
    kept = CacheFormat(**CACHES[cache])
    backends = Backends(Backend.MLIR, chosen, Backend.MLIR, "as auto has it") if backend == "auto" else None
    if backend == "mlir, panels":
        held = CacheLayout(model.cache_shapes(kept), page_size, dtype)
        backends = choose_weight_layout(model, Backends.uniform(chosen, "asked for"), held, auto=False)
    given = {"max_num_seqs": 3, "max_num_batched_tokens": BUDGET, "pages": 60, "policy": "fcfs", **more}
    runner = runner_of(model, backends=backends, cache=kept, page_size=page_size, **given)
    if backend in ("auto", "mlir, blocks", "mlir, panels"):
        programs = runner.core.executor.programs
        few_bits = backend == "mlir, blocks" and weights_in_panels(model)  # such lie in panels wherever mlir decodes
        assert ("prefill" in programs) == (backend == "mlir, panels" or few_bits)
        programs["rows"].max_tokens = 0  # type: ignore[attr-defined]
    return runner


def holds(
    layers: str | ModelSpec, weights: str, cache: str, page_size: int, backend: str, tied: bool = True,
    asked: list[Request] = REQUESTS, **more: Any,
) -> None:  # fmt: skip
    """Assert that each sampled row is the oracle's, or over packed pages, which it has none of, that of the modules."""
    if problem := backend_problems()[BACKENDS[backend]]:
        pytest.skip(f"backend {backend}: {problem}")
    runner = build(layers, weights, cache, page_size, backend, tied, **more)
    if cache == "dense":
        oracle = Oracle(runner)
        generate(runner, asked)
        assert oracle.clear
        return
    found, right = (rows_of(each, asked) for each in (runner, build(layers, weights, cache, page_size, "eager", tied)))
    shared = found.keys() & right.keys()
    assert len(shared) > 12
    bound = 1e-4 if WEIGHTS[weights][0] == torch.float32 and weights != "int8 rows" else 0.06
    for text in shared:
        assert (found[text] - right[text]).abs().max() <= bound * (1 + right[text].abs().max()), len(text)


@pytest.mark.usefixtures("as_written")
@rows(
    {"layers": list(LAYERS), "weights": CROSSED, "page_size": PAGE_SIZES, "backend": list(BACKENDS),
     "tied": [True, False]},
    {"layers": "wide", "weights": "int8 rows", "page_size": 3, "backend": "mlir, panels"},
    {"layers": "as Gemma", "weights": "int8", "page_size": 100, "backend": "mlir, panels"},
    {"layers": "mixture", "weights": "float64"},
    {"layers": "latent", "weights": "float64"},
    *({"weights": name, "backend": "mlir"} for name in WEIGHTS if name not in (*CROSSED, "float64")),
    *on_compiled(SETTINGS),
    valid=is_cheap,
)  # fmt: skip
def test_backend_equals_oracle(layers: str, weights: str, page_size: int, backend: str, tied: bool) -> None:
    """Over pages of keys and values as they are, at the machine's highest level."""
    holds(layers, weights, "dense", page_size, backend, tied)


@pytest.mark.usefixtures("as_written")
@rows(
    {"cache": list(CACHES)[1:], "backend": list(BACKENDS)[1:], "layers": ["windows", "wide"],
     "weights": ["float32", "bfloat16", "int8"], "page_size": [8, 48]},
    {"cache": "fp8", "layers": "windows", "weights": "bfloat16", "page_size": 48, "backend": "mlir"},
    {"cache": "fp8", "layers": "wide", "weights": "bfloat16", "page_size": 8, "backend": "mlir, panels"},
    *on_compiled(PACKED_SETTINGS),
    valid=is_cheap,
)  # fmt: skip
def test_packed_pages_equal_modules(cache: str, backend: str, layers: str, weights: str, page_size: int) -> None:
    """Every backend reads of a packed cache what the modules read."""
    holds(layers, weights, cache, page_size, backend)


# What levels multiply by instructions of their own; test_panels.py holds every format's product at every level.
AT_LEVELS = ["bfloat16", "int8 rows", "int4 with minima", "int8 by group"]
# More than one run of rows, from the first step to the last: few steps are compiled. Code grows with rows, and code for
# instructions that this machine lacks takes long to compile: there steps are of 32 rows, and then of four.
SEVENTEEN = [request(f"r{i}", 3 + i, 5) for i in range(17)] if THOROUGH else in_step(*[3] * 16, 16)
SHORT = [request(f"r{i}", 1 + i % 2, 12 if i < 3 else 10) for i in range(17)]
ONE_LAYER = {  # or two alike; of the three some have biases, norms of queries and keys, windows, sinks and caps
    "windows": spec_of(LAYERS["windows"].layers[0]), "wide": WIDE.model_copy(update={"layers": WIDE.layers[1:2]}),
    "mixture": LAYERS["mixture"],
}  # fmt: skip


@pytest.mark.levels
@pytest.mark.sampled(4)
@rows({"level": sorted(Level, key=lambda level: level == current_level()), "layers": list(ONE_LAYER),
       "weights": [name for name in WEIGHTS if name != "float64"] if THOROUGH else AT_LEVELS,
       "backend": ["mlir", "mlir, blocks"]},
      # In so few bits a row's last bit may choose another expert.
      valid=lambda layers, weights, **_: (layers, weights) != ("mixture", "bfloat16"))  # fmt: skip
def test_backend_equals_oracle_at_lower_levels(level: Level, layers: str, weights: str, backend: str) -> None:
    spec, asked, tokens = (layers, SEVENTEEN, 64) if THOROUGH else (ONE_LAYER[layers], SHORT, 32)
    with limited_to(level):
        holds(spec, weights, "dense", 8, backend, asked=asked, max_num_seqs=17, max_num_batched_tokens=tokens)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_many_rows_equal_oracle(weights: str) -> None:
    holds("mixture", weights, "dense", 8, "mlir", asked=SEVENTEEN, max_num_seqs=17, max_num_batched_tokens=64)


@settings(max_examples=tries(8), deadline=None, derandomize=not THOROUGH)
@given(specs, st.integers(1, 3))
def test_any_layers_equal_oracle_in_the_compiled_step(spec: ModelSpec, together: int) -> None:
    """Windows, groups, biases, odd widths; rows are padded to a bucket."""
    asked = [*REQUESTS[:together], request("late", 8, 3)]  # in the row of the first that ends
    holds(spec, "float32", "dense", 4, "mlir", asked=asked, max_num_seqs=together)


EVERY_RULE = layer(4, 2, softcap=3.0, sink_logits=True, qk_norm=True, sliding_window=9, num_sink_tokens=1,
                   mask=own("even"), score=own("farther"))  # fmt: skip
# Three prompts in the first step, a longer one beside their decodes, then three rows in a bucket of four: Inductor
# compiles no graph for one decode, and one head. Those are test_compiled.py's and test-thorough's, and the same Python
# is held above.
ONE_BUCKET = [request("ends", 5, 3), *in_step(4, 3, tokens=5), request("long", 20, 3)]
COMPILED: list[tuple[str | ModelSpec, str, str, str, CompileUnit]] = [  # few: each takes many seconds
    (spec_of(EVERY_RULE), "float32", "dense", "inductor", "block"),
    (spec_of(layer(4, 2, bias=True)), "float32", "dense", "auto", "block"),
    *([(spec_of(GEMMA.model_copy(update={"attention": LATENT, "experts": MIXTURE.experts}), layer(4, 2),
                layer(2, 2, kv_shared_with=1)), "float64", "dense", "inductor", "block"),
       (in_eights(spec_of(layer(4, 2, bias=True, sliding_window=9))), "int4", "int8, int4", "inductor", "block")]
      if THOROUGH else []),
    *([(name, weights, "dense", "inductor", unit) for name in LAYERS for weights in WEIGHTS
       for unit in ("block", "step")] if THOROUGH else []),
]  # fmt: skip


@pytest.mark.timeout(limit(240))  # graph after graph, on a machine that never compiled them
@pytest.mark.parametrize(("layers", "weights", "cache", "backend", "unit"), COMPILED, ids=str)
def test_what_inductor_compiles_equals_oracle(
    layers: str | ModelSpec, weights: str, cache: str, backend: str, unit: CompileUnit
) -> None:
    few: dict[str, Any] = {"asked": ONE_BUCKET, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    holds(layers, weights, cache, 8, backend, compile=unit, **({} if THOROUGH else few))


def test_rows_are_those_that_the_table_allows() -> None:
    """Rows that are said above to have a whole step have one by the product's table, and no others."""
    plain = spec_of(layer(dim=8))
    wanted = {name: Requirements(spec) for name, spec in LAYERS.items()}
    wanted |= {name: Requirements(cache=cache_shapes(plain, CacheFormat(**kept))) for name, kept in CACHES.items()}
    wanted |= {name: Requirements(None, *each) for name, each in WEIGHTS.items()}
    for name, each in wanted.items():
        step = unsupported(Backend.MLIR, each, "step") is None
        assert step == (name not in WITHOUT_STEP and name != "float64"), name
        for backend in (Backend.EAGER, Backend.INDUCTOR, Backend.MLIR):
            assert unsupported(backend, each) is None or (backend, name) == (Backend.MLIR, "float64"), name
