"""Load a model by name into a runner, with its speculator: a folder, `demo`, `demo-draft`, or `shape:NAME` with seeded
random weights."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.backends import AUTO_BACKEND
from workbench.engine import load as heap
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError, nearest
from workbench.executors.autotune import autotune_backend
from workbench.executors.base import CompileUnit, MlirExecutor
from workbench.executors.layout import choose_weight_layout
from workbench.executors.reference import CacheLayout
from workbench.executors.select import (
    check_batch_invariant_cache,
    incompatible_settings,
    resolve_backends,
    select_batch_invariant,
    select_for_cache,
    select_for_model,
)
from workbench.kv_cache.eviction import EvictionPolicy, parse_eviction
from workbench.kv_cache.format import CacheFormat, KVCacheSpec, parse_cache_format
from workbench.kv_cache.pages import build_cache_groups
from workbench.kv_cache.settings import parse_offload, parse_prefix_cache
from workbench.model import shapes
from workbench.model.attention_config import AttentionConfig
from workbench.model.hf import families
from workbench.model.hf.fields import ConfigFields, read_object
from workbench.model.hf.weights import load_weights, random_weights
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.model.variants import change_attention, change_spec
from workbench.progress import report_if_slow, to_stderr
from workbench.prompt.tokenizer import Tokenizer
from workbench.scheduler.plan import SchedulerLimits
from workbench.scheduler.policies import BatchingMode, PreemptionMode, parse_policy
from workbench.speculative.config import DraftModel, NoSpeculation, PromptLookup, parse_speculation
from workbench.speculative.draft_model import CompiledDraftSteps, DraftModelProposer
from workbench.speculative.proposers import PromptLookupProposer, Proposer, Speculator
from workbench.trace.events import Event

DEMO_FOLDER = Path(__file__).resolve().parent.parent / "demo"
BUNDLED_MODELS = {"demo": DEMO_FOLDER / "target", "demo-draft": DEMO_FOLDER / "draft"}
SHAPE_PREFIX = "shape:"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
AUTO_CACHE_BYTES = 2**30  # bytes that the cache may take when `pages` is "auto"
Overflow = Literal["refuse", "cut_oldest"]
CALLBACK_ARGUMENTS = (
    "listener",
    "report",
    "clock",
    "sleep",
)  # arguments of `load` that do not describe the runner


def load(
    model: str | Path = "demo",
    *,
    dtype: str | torch.dtype = "auto",
    weights: str = "dense",
    head_weights: str | None = None,
    weight_group: int = 64,
    activations: str = "float",
    backend: str = "auto",
    compile: CompileUnit = "block",
    device: str = "cpu",
    seed: int = 0,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 512,
    chunk_tokens: int | None = None,
    chunked_prefill: bool = True,
    schedule: BatchingMode = "continuous",
    policy: Any = "fcfs",
    preemption_mode: PreemptionMode = "auto",
    page_size: int = 64,
    pages: int | Literal["auto"] = "auto",
    cache: str | Mapping[str, Any] | CacheFormat = "dense",
    prefix: Any = "off",
    offload: Any = "none",
    evict: Any = None,
    overflow: Overflow = "refuse",
    attention: AttentionConfig | dict[str, Any] | None = None,
    batch_invariant: bool = False,
    speculate: Any = "none",
    listener: Callable[[Event], None] | None = None,
    report: Callable[[str], None] = to_stderr,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Runner:
    """Load `model` and return a runner.

        runner = workbench.load("demo", cache="int8", backend="eager")
        for event in runner.stream("def fib(n):", max_tokens=32, temperature=0):
            print(event.text, end="")

    `dtype` is `float32`, `bfloat16`, `float16` or `auto` (what the files say; bfloat16 for shapes); `weights` and
    `head_weights` (as `weights` unless given) are `dense`, `int8` or `int4` in groups of `weight_group` columns;
    `backend` is `eager`, `inductor`, `triton`, `mlir` or `auto` (see executors/autotune.py); `activations` are `float`
    or, where weights are `int8`, `int8`: each row is quantized just before it is multiplied; `compile` is the unit that
    Inductor compiles, a `block` or a whole decode `step`; `seed` is for random weights; `attention` has the changes to
    the model's attention, as in an experiment (`{"sliding_window": 128, "num_sink_tokens": 4}`). `cache` is the format
    of keys and values: `dense`, `int8`, `int4`, `fp8`, or settings as in an experiment's `cache:` (kv_cache/format.py).
    `prefix` is `off` or `radix` (or {"kind": "radix", "ttl": seconds}): pages are found again by their tokens.
    `offload` is `none`, `memory` or {"kind": "file", "path": ...}: the place of a preempted sequence's pages. `evict`
    is a policy that keeps each sequence within a budget, as in an experiment ({"kind": "heavy_hitters", "budget": 256},
    or `window`, `sinks_recent`, `snapkv`; see kv_cache/eviction.py). `schedule` is `continuous` or `static` (a batch
    waits for its last request). `policy` chooses the request to run next: `fcfs`, `prefill_first`, `decode_first`,
    `shortest_prompt`, `priority`, `fair`, settings ({"kind": "priority", "starvation_limit": 100}), or a function from
    a state to a decision (see scheduler/policy.py). `chunk_tokens` are a step's prefill tokens at most, and without
    `chunked_prefill` no prompt is cut. `preemption_mode` is `recompute`, `offload` or `auto` (offload if there is a
    place). With `batch_invariant` a request's logits have the same bits alone, in any batch and chunking, and after any
    cached prefix (see executors/token_parallel.py); it is refused if a backend, model or cache cannot keep that.
    `speculate` is `none`, `prompt_lookup`, `draft`, or settings as in an experiment's `speculate:` (see
    speculative/config.py): proposed tokens are verified by the next step. `listener` receives every event of the
    runner, `report` a line on each slow part of loading.
    """
    asked = {name: value for name, value in locals().items() if name not in CALLBACK_ARGUMENTS}
    if page_size < 1 or (pages != "auto" and pages < 1):
        raise WorkbenchError(f"pages and page_size must be at least 1, not {pages} and {page_size}")
    if overflow not in get_args(Overflow):
        raise WorkbenchError(f"unknown overflow {overflow!r}; known: {', '.join(get_args(Overflow))}")
    torch_dtype = None if dtype == "auto" else parse_dtype(dtype)
    if compile not in get_args(CompileUnit):
        raise WorkbenchError(f"unknown unit of compilation {compile!r}; known: {', '.join(get_args(CompileUnit))}")
    prefix, offload, evicts = parse_prefix_cache(prefix), parse_offload(offload), parse_eviction(evict)
    if preemption_mode not in get_args(PreemptionMode):
        raise WorkbenchError(
            f"unknown preemption_mode {preemption_mode!r}; known: {', '.join(get_args(PreemptionMode))}"
        )
    policy, speculate = parse_policy(policy, schedule), parse_speculation(speculate)
    if problem := incompatible_settings(batch_invariant, evicts is not None, not isinstance(speculate, NoSpeculation)):
        raise WorkbenchError(problem)
    limits = SchedulerLimits(max_num_seqs, max_num_batched_tokens, chunk_tokens, chunked_prefill)
    format, place = WeightFormat.parse(weights, head_weights, weight_group, activations), _device(device)
    kept, backends = parse_cache_format(cache), resolve_backends(backend, place.type)
    source = _source(str(model), AttentionConfig.parse(attention))
    format.check(source.spec)
    kept.check(len(source.spec.layers), page_size)
    if batch_invariant:
        backends = select_batch_invariant(backends, backend, source.spec, place.type)
    else:
        backends = select_for_model(backends, source.spec, backend == AUTO_BACKEND, format)
    with report_if_slow(f"loading the weights of {model}", report):
        state = source.state(torch_dtype, seed)
        transformer = Transformer.from_state(source.spec, state, backends.blocks, format).to(place)
    cache_dtype = transformer.dtype if kept.dtype == "auto" else parse_dtype(kept.dtype)
    shapes = transformer.cache_shapes(kept)
    if batch_invariant:
        check_batch_invariant_cache(shapes, cache_dtype, transformer.dtype)
    backends = select_for_cache(
        backends, shapes, page_size, cache_dtype, transformer.dtype, backend == AUTO_BACKEND and not batch_invariant
    )
    if backend == AUTO_BACKEND and not batch_invariant:
        with report_if_slow(
            f"trying which backend decodes {model} fastest here: compiled now, then remembered", report
        ):
            backends = autotune_backend(backends, transformer, page_size, compile, cache=kept, cache_dtype=cache_dtype)
        transformer.set_backend(backends.blocks)
    with report_if_slow(f"laying out the weights of {model}", report):
        held = CacheLayout(shapes, page_size, cache_dtype)
        backends = choose_weight_layout(
            transformer, backends, held, auto=backend == AUTO_BACKEND and not batch_invariant
        )
    if compile == "step" and backends.decode is not Backend.INDUCTOR:
        backends = replace(
            backends, reason=f"{backends.reason}; compile: step has no effect, since {backends.decode} decodes"
        )
    fitting = _auto_num_pages(source.spec.max_position_embeddings, shapes, cache_dtype, limits, page_size, evicts)
    heap.trim_heap()
    tokenizer = source.tokenizer()
    drafts = None
    if not isinstance(speculate, NoSpeculation):
        shared = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "device": device}
        shared |= {"page_size": page_size, "compile": compile, "seed": seed, "report": report}
        made = partial(load, **shared)
        drafts = build_speculator(speculate, source.spec, tokenizer, backend, made)
    runner = Runner(
        transformer,
        tokenizer,
        limits=limits,
        policy=policy,
        preemption_mode=preemption_mode,
        page_size=page_size,
        pages=fitting if pages == "auto" else pages,
        cache=kept,
        cache_dtype=cache_dtype,
        prefix=prefix,
        offload=offload,
        evict=evicts,
        overflow=overflow,
        listener=listener,
        backends=backends,
        clock=clock,
        sleep=sleep,
        compile=compile,
        batch_invariant=batch_invariant,
        speculator=drafts,
    )
    runner.load_arguments = MappingProxyType(asked)
    return runner


def describe_model(name: str, attention: AttentionConfig | dict[str, Any] | None = None) -> tuple[ModelSpec, str]:
    """Return the spec of the model called `name` with its attention changed, and the dtype that `auto` means; reads no
    weights."""
    source = _source(name, AttentionConfig.parse(attention))
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
    attention: AttentionConfig
    folder: Path | None = None
    trained: ModelSpec | None = None

    def state(self, dtype: torch.dtype | None, seed: int) -> dict[str, Tensor]:
        if self.folder is None or self.trained is None:
            return random_weights(self.spec, dtype or torch.bfloat16, seed)
        stored = load_weights(self.folder, self.trained, dtype or stored_dtype(self.folder / "config.json"))
        return stored if self.attention.is_unchanged else change_attention(self.trained, stored, self.attention)[1]

    def tokenizer(self) -> Tokenizer | None:
        return None if self.folder is None else Tokenizer.from_folder(self.folder)


def _source(name: str, attention: AttentionConfig) -> _Source:
    if name.startswith(SHAPE_PREFIX):
        return _Source(change_spec(shapes.named_shape(name.removeprefix(SHAPE_PREFIX)), attention), attention)
    folder = _folder(name)
    trained = families.read_spec(folder)
    return _Source(change_spec(trained, attention), attention, folder, trained)


def model_folder(name: str) -> Path | None:
    """Return the folder that a model's name means; None for a shape."""
    return None if name.startswith(SHAPE_PREFIX) else _folder(name)


def _folder(name: str) -> Path:
    folder = BUNDLED_MODELS.get(name, Path(name))
    if not folder.is_dir():
        known = ", ".join([*BUNDLED_MODELS, f"{SHAPE_PREFIX}NAME"])
        raise WorkbenchError(f"no model {name!r}: not a folder here, nor one of {known}{nearest(name, BUNDLED_MODELS)}")
    return folder


def stored_dtype(config: Path) -> torch.dtype:
    """Return the dtype in config.json, under its new name or its old one; float32 if there is none."""
    fields = ConfigFields(read_object(config), str(config))
    key = "torch_dtype" if fields.get("dtype") is None else "dtype"
    name = fields.get(key)
    if name is None:
        return torch.float32
    if not isinstance(name, str) or name.removeprefix("torch.") not in DTYPES:
        raise fields.invalid(key, name, f"one of {', '.join(DTYPES)}; or choose what to load as with dtype=...")
    return parse_dtype(name)


def _auto_num_pages(
    context: int,
    shapes: tuple[KVCacheSpec, ...],
    dtype: torch.dtype,
    limits: SchedulerLimits,
    page_size: int,
    policy: EvictionPolicy | None,
) -> tuple[int, ...]:
    """Return the pages of each cache group for `max_num_seqs` sequences of full context (or of a window, or of the
    budget of `policy`), or as many as AUTO_CACHE_BYTES holds."""
    tables, chunk = build_cache_groups(shape.cache_groups for shape in shapes), limits.max_prefill_tokens
    page_bytes = [
        page_size * sum(shapes[layer].group_bytes_per_token(number, dtype) for layer in table.layers)
        for number, table in enumerate(tables)
    ]
    if policy is not None:
        context = policy.budget_for(page_size, round(sum(page_bytes))).peak_tokens(context, context)
    wanted = [limits.max_num_seqs * table.max_pages(context, chunk, page_size) for table in tables]
    whole = sum(pages * each for pages, each in zip(wanted, page_bytes, strict=True))
    return tuple(max(1, min(pages, int(pages * AUTO_CACHE_BYTES // whole))) for pages in wanted)


def build_speculator(
    settings: PromptLookup | DraftModel,
    spec: ModelSpec,
    tokenizer: Tokenizer | None,
    backend: str,
    load: Callable[..., Runner],
) -> Speculator:
    """Build a speculator for a model of `spec` on backend `backend`; `load` loads a draft model like the target.

    Raises:
        WorkbenchError: for a draft model with other tokens than the target's.
    """
    proposer: Proposer
    if isinstance(settings, PromptLookup):
        proposer = PromptLookupProposer(settings.min_ngram, settings.max_ngram)
    else:
        draft = load(settings.model, dtype=settings.dtype, backend=settings.backend or backend)
        check_same_vocabulary(settings.model, draft.tokenizer, draft.model.spec, tokenizer, spec)
        proposer = DraftModelProposer(
            draft.model.spec, draft.executor, draft.kv_cache.manager, draft.scheduler.limits.max_prefill_tokens,
            common_random_numbers=settings.accept == "match", confidence_threshold=settings.confidence_threshold,
            multi_step=_multi_step(draft, settings),
        )  # fmt: skip
    return Speculator(
        proposer, settings.num_speculative_tokens, spec.max_position_embeddings, settings.length, settings.accept
    )


def _multi_step(draft: Runner, settings: DraftModel) -> CompiledDraftSteps | None:
    """Return a call that drafts several tokens, if the draft model decodes by compiled steps; None otherwise."""
    if not isinstance(draft.executor, MlirExecutor) or CompiledDraftSteps.unsupported_reason(draft.model, draft.store):
        return None
    max_draft_tokens, least = settings.num_speculative_tokens + 1, settings.confidence_threshold
    return CompiledDraftSteps(draft.model, draft.store, max_draft_tokens, least)


def check_same_vocabulary(
    name: str, draft: Tokenizer | None, draft_spec: ModelSpec, target: Tokenizer | None, spec: ModelSpec
) -> None:
    """Refuse a draft model whose ids mean other tokens than the target's (WorkbenchError)."""
    refused = f"speculate.model {name}: a draft must have the target's tokenizer"
    if draft_spec.vocab_size != spec.vocab_size:
        raise WorkbenchError(
            f"{refused}; its vocabulary has {draft_spec.vocab_size} tokens, {spec.name}'s {spec.vocab_size}"
        )
    if draft is None or target is None:
        if draft is not target:
            raise WorkbenchError(f"{refused}; {'it' if draft is None else spec.name} has none at all")
        return
    for token in range(max(draft.vocab_size, target.vocab_size)):
        ours, theirs = (each.id_to_token(token) if token < each.vocab_size else "" for each in (target, draft))
        if ours != theirs:
            raise WorkbenchError(f"{refused}; token {token} is {theirs!r} there and {ours!r} in {spec.name}")


def trim_heap() -> None:
    """Return memory that was freed but kept for later (glibc's malloc_trim; elsewhere nothing happens).

    Creating or converting weights leaves a hundred megabytes of freed pieces that decode never asks for again.
    """
    try:
        release = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc
        return
    release(0)
