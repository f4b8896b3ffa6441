"""Load a model by name into a runner: a folder, `demo`, `demo-draft`, or `shape:NAME` with seeded random weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from compiled_kernels import Lane
from compiled_kernels.lanes import AUTO
from workbench.cache.evict import Evict, evict_from
from workbench.cache.format import CacheFormat, cache_format
from workbench.cache.settings import offload_from, prefix_from
from workbench.cache.shapes import CacheShape
from workbench.cache.tables import tables_of
from workbench.engine import heap
from workbench.engine.drafting import drafts_of
from workbench.engine.exact import Held
from workbench.engine.excluded import excluded
from workbench.engine.executors import Unit
from workbench.engine.fitting import fitted
from workbench.engine.invariant_lanes import check_cache, invariant
from workbench.engine.lanes import resolve_lanes
from workbench.engine.layout import lay_out
from workbench.engine.packed_lanes import fitted_to
from workbench.engine.patience import to_stderr, told_if_long
from workbench.engine.runner import Runner
from workbench.engine.schedule import Kind, SetBack, policy_from
from workbench.engine.scheduler import Limits
from workbench.engine.speculation import NoSpeculation, speculation_from
from workbench.engine.trial import measured
from workbench.errors import WorkbenchError, nearest
from workbench.model import families, shapes
from workbench.model.composition import AttentionPart
from workbench.model.config_fields import Fields, read_object
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.model.variants import vary, vary_spec
from workbench.model.weights import load_weights, random_weights
from workbench.prompt.tokenizer import Tokenizer
from workbench.trace.events import Event

DEMO = Path(__file__).resolve().parent.parent / "demo"
SHIPPED = {"demo": DEMO / "target", "demo-draft": DEMO / "draft"}
SHAPE = "shape:"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
CACHE_MEMORY = 2**30  # bytes the cache may take when `pages` is left to us
Overflow = Literal["refuse", "cut_oldest"]
HEARD = ("note", "tell", "clock", "sleep")  # of what `load` is given, what does not say what the runner is


def load(
    model: str | Path = "demo",
    *,
    dtype: str | torch.dtype = "auto",
    weights: str = "dense",
    head_weights: str | None = None,
    weight_group: int = 64,
    activations: str = "float",
    lane: str = "auto",
    compile: Unit = "block",
    device: str = "cpu",
    seed: int = 0,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 512,
    chunk_tokens: int | None = None,
    chunked_prefill: bool = True,
    schedule: Kind = "continuous",
    policy: Any = "fcfs",
    set_back: SetBack = "auto",
    page_size: int = 64,
    pages: int | Literal["auto"] = "auto",
    cache: str | Mapping[str, Any] | CacheFormat = "dense",
    prefix: Any = "off",
    offload: Any = "none",
    evict: Any = None,
    overflow: Overflow = "refuse",
    attention: AttentionPart | dict[str, Any] | None = None,
    batch_invariant: bool = False,
    speculate: Any = "none",
    note: Callable[[Event], None] | None = None,
    tell: Callable[[str], None] = to_stderr,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Runner:
    """Load `model` and return a runner.

        runner = workbench.load("demo", cache="int8", lane="eager")
        for event in runner.stream("def fib(n):", max_tokens=32, temperature=0):
            print(event.text, end="")

    `dtype` is `float32`, `bfloat16`, `float16` or `auto` (what the files say; bfloat16 for shapes); `weights` and
    `head_weights` (as `weights` unless given) are `dense`, `int8` or `int4` in groups of `weight_group` columns; `lane`
    is `eager`, `inductor`, `triton`, `mlir` or `auto` (see trial.py); `activations` are `float` or, where weights are
    `int8`, `int8`: each row of what is multiplied is quantized as it comes; `compile` is what Inductor
    compiles at once, a `block` or a whole decode `step`; `seed` is for random weights; `attention` is what changes in
    the model's attention, as in an experiment (`{"window": 128, "sinks": 4}`). `cache` says how keys and values are
    kept: `dense`, `int8`, `int4`, `fp8`, or settings as in an experiment's `cache:` (see cache/format.py); `prefix` is
    `off` or `radix` (or {"kind": "radix", "ttl": seconds}): pages are found again by their tokens; `offload` is `none`,
    `memory` or {"kind": "file", "path": ...}: where the pages of a sequence that is set back may lie meanwhile; `evict`
    is a policy that keeps each sequence within a budget, as in an experiment ({"kind": "heavy_hitters", "budget": 256},
    or `window`, `sinks_recent`, `snapkv`; see cache/evict.py). `schedule` is `continuous` or `static` (a batch waits
    for its last), `policy` who is served next: `fcfs`, `prefill_first`, `decode_first`, `shortest_prompt`, `priority`,
    `fair`, settings ({"kind": "priority", "patience": 100}), or a function from a state to wishes (see
    engine/policy.py); `chunk_tokens` are a step's prefill tokens at most, and without `chunked_prefill` no prompt is
    cut; `set_back` is `recompute`, `offload` or `auto` (offload where there is a place). With `batch_invariant` a
    request's logits have the same bits alone, in any batch and chunking, after any prefix that was computed before (see
    invariant.py); refused where a lane, model or cache cannot keep that. `speculate` is `none`, `prompt_lookup`,
    `draft`, or settings as in an experiment's `speculate:` (see engine/speculation.py): tokens that are proposed for
    what comes next and checked by the next step. `note` receives every event of the runner, `tell` a line on what
    takes long in loading.
    """
    asked = {name: value for name, value in locals().items() if name not in HEARD}
    if page_size < 1 or (pages != "auto" and pages < 1):
        raise WorkbenchError(f"pages and page_size must be at least 1, not {pages} and {page_size}")
    if overflow not in get_args(Overflow):
        raise WorkbenchError(f"unknown overflow {overflow!r}; known: {', '.join(get_args(Overflow))}")
    torch_dtype = None if dtype == "auto" else parse_dtype(dtype)
    if compile not in get_args(Unit):
        raise WorkbenchError(f"unknown unit of compilation {compile!r}; known: {', '.join(get_args(Unit))}")
    prefix, offload, evicts = prefix_from(prefix), offload_from(offload), evict_from(evict)
    if set_back not in get_args(SetBack):
        raise WorkbenchError(f"unknown set_back {set_back!r}; known: {', '.join(get_args(SetBack))}")
    policy, speculate = policy_from(policy, schedule), speculation_from(speculate)
    if problem := excluded(batch_invariant, evicts is not None, not isinstance(speculate, NoSpeculation)):
        raise WorkbenchError(problem)
    limits = Limits(max_num_seqs, max_num_batched_tokens, chunk_tokens, chunked_prefill)
    format, place = WeightFormat.of(weights, head_weights, weight_group, activations), _device(device)
    kept, lanes = cache_format(cache), resolve_lanes(lane, place.type)
    source = _source(str(model), AttentionPart.of(attention))
    format.check(source.spec)
    kept.check(len(source.spec.layers), page_size)
    if batch_invariant:
        lanes = invariant(lanes, lane, source.spec, place.type)
    else:
        lanes = fitted(lanes, source.spec, lane == AUTO, format)
    with told_if_long(f"loading the weights of {model}", tell):
        state = source.state(torch_dtype, seed)
        transformer = Transformer.from_state(source.spec, state, lanes.blocks, format).to(place)
    cache_dtype = transformer.dtype if kept.dtype == "auto" else parse_dtype(kept.dtype)
    shapes = transformer.cache_shapes(kept)
    if batch_invariant:
        check_cache(shapes, cache_dtype, transformer.dtype)
    lanes = fitted_to(lanes, shapes, page_size, cache_dtype, transformer.dtype, lane == AUTO and not batch_invariant)
    if lane == AUTO and not batch_invariant:
        with told_if_long(f"trying which lane decodes {model} fastest here: compiled now, then remembered", tell):
            lanes = measured(lanes, transformer, page_size, compile, cache=kept, cache_dtype=cache_dtype)
        transformer.run_on(lanes.blocks)
    with told_if_long(f"laying out the weights of {model}", tell):
        held = Held(shapes, page_size, cache_dtype)
        lanes = lay_out(transformer, lanes, held, auto=lane == AUTO and not batch_invariant)
    if compile == "step" and lanes.decode is not Lane.INDUCTOR:
        lanes = replace(lanes, reason=f"{lanes.reason}; compile: step has no effect, since {lanes.decode} decodes")
    fitting = _pages_that_fit(source.spec.context, shapes, cache_dtype, limits, page_size, evicts)
    heap.trim()
    tokenizer = source.tokenizer()
    drafts = None
    if not isinstance(speculate, NoSpeculation):
        shared = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "device": device}
        shared |= {"page_size": page_size, "compile": compile, "seed": seed, "tell": tell}
        made = partial(load, **shared)
        drafts = drafts_of(speculate, source.spec, tokenizer, lane, made)
    runner = Runner(
        transformer,
        tokenizer,
        limits=limits,
        policy=policy,
        set_back=set_back,
        page_size=page_size,
        pages=fitting if pages == "auto" else pages,
        cache=kept,
        cache_dtype=cache_dtype,
        prefix=prefix,
        offload=offload,
        evict=evicts,
        overflow=overflow,
        note=note,
        lanes=lanes,
        clock=clock,
        sleep=sleep,
        compile=compile,
        batch_invariant=batch_invariant,
        drafts=drafts,
    )
    runner.asked = MappingProxyType(asked)
    return runner


def described(name: str, attention: AttentionPart | dict[str, Any] | None = None) -> tuple[ModelSpec, str]:
    """Return the spec of the model called `name` with its attention changed, and the dtype that `auto` means; reads no
    weights."""
    source = _source(name, AttentionPart.of(attention))
    stored = torch.bfloat16 if source.folder is None else stored_dtype(source.folder / "config.json")
    return source.spec, str(stored).removeprefix("torch.")


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise WorkbenchError(f"unknown dtype {name!r}{nearest(name, DTYPES)}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise WorkbenchError(f"device {name!r} does not work here ({reason}); cpu always does") from None


@dataclass(frozen=True)
class _Source:
    """The origin of a model: `spec` is the model to build, `trained` that of its folder, if there is one."""

    spec: ModelSpec
    attention: AttentionPart
    folder: Path | None = None
    trained: ModelSpec | None = None

    def state(self, dtype: torch.dtype | None, seed: int) -> dict[str, Tensor]:
        if self.folder is None or self.trained is None:
            return random_weights(self.spec, dtype or torch.bfloat16, seed)
        stored = load_weights(self.folder, self.trained, dtype or stored_dtype(self.folder / "config.json"))
        return stored if self.attention.changes_nothing else vary(self.trained, stored, self.attention)[1]

    def tokenizer(self) -> Tokenizer | None:
        return None if self.folder is None else Tokenizer.from_folder(self.folder)


def _source(name: str, attention: AttentionPart) -> _Source:
    if name.startswith(SHAPE):
        return _Source(vary_spec(shapes.named_shape(name.removeprefix(SHAPE)), attention), attention)
    folder = _folder(name)
    trained = families.read_spec(folder)
    return _Source(vary_spec(trained, attention), attention, folder, trained)


def folder_of(name: str) -> Path | None:
    """Return the folder that a model's name means; None for a shape."""
    return None if name.startswith(SHAPE) else _folder(name)


def _folder(name: str) -> Path:
    folder = SHIPPED.get(name, Path(name))
    if not folder.is_dir():
        known = ", ".join([*SHIPPED, f"{SHAPE}NAME"])
        raise WorkbenchError(f"no model {name!r}: not a folder here, nor one of {known}{nearest(name, SHIPPED)}")
    return folder


def stored_dtype(config: Path) -> torch.dtype:
    """Return the dtype in config.json, under its new name or its old one; float32 if there is none."""
    fields = Fields(read_object(config), str(config))
    key = "torch_dtype" if fields.get("dtype") is None else "dtype"
    name = fields.get(key)
    if name is None:
        return torch.float32
    if not isinstance(name, str) or name.removeprefix("torch.") not in DTYPES:
        raise fields.wrong(key, name, f"one of {', '.join(DTYPES)}; or choose what to load as with dtype=...")
    return parse_dtype(name)


def _pages_that_fit(
    context: int,
    shapes: tuple[CacheShape, ...],
    dtype: torch.dtype,
    limits: Limits,
    page_size: int,
    policy: Evict | None,
) -> tuple[int, ...]:
    """Pages of each table for every sequence at full context (of a window, what it sees; with a `policy`, its budget),
    or as many as the memory set aside holds."""
    tables, chunk = tables_of(shape.tables for shape in shapes), limits.chunk
    page_bytes = [
        page_size * sum(shapes[layer].table_bytes(number, dtype) for layer in table.layers)
        for number, table in enumerate(tables)
    ]
    if policy is not None:
        context = policy.budget_for(page_size, round(sum(page_bytes))).at_once(context, context)
    wanted = [limits.max_num_seqs * table.most(context, chunk, page_size) for table in tables]
    whole = sum(pages * each for pages, each in zip(wanted, page_bytes, strict=True))
    return tuple(max(1, min(pages, int(pages * CACHE_MEMORY // whole))) for pages in wanted)
