"""From a name to a runner: a folder, `demo`, `demo-draft`, or `shape:NAME` with seeded random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import torch

from compiled_kernels import Lane
from compiled_kernels.lanes import AUTO
from workbench.cache.pages import pages_for
from workbench.engine import heap
from workbench.engine.executors import Unit
from workbench.engine.lanes import resolve_lanes
from workbench.engine.patience import to_stderr, told_if_long
from workbench.engine.runner import Runner
from workbench.engine.scheduler import Limits
from workbench.engine.trial import measured
from workbench.errors import WorkbenchError, nearest
from workbench.model import families, shapes
from workbench.model.config_fields import Fields, read_object
from workbench.model.quantized import WeightFormat
from workbench.model.transformer import Transformer
from workbench.model.weights import load_weights, random_weights
from workbench.prompt.tokenizer import Tokenizer
from workbench.trace.events import Event

DEMO = Path(__file__).resolve().parent.parent / "demo"
SHIPPED = {"demo": DEMO / "target", "demo-draft": DEMO / "draft"}
SHAPE = "shape:"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
CACHE_MEMORY = 2**30  # bytes the cache may take when `pages` is left to us
Overflow = Literal["refuse", "cut_oldest"]


def load(
    model: str | Path = "demo",
    *,
    dtype: str | torch.dtype = "auto",
    weights: str = "dense",
    head_weights: str | None = None,
    weight_group: int = 64,
    lane: str = "auto",
    compile: Unit = "block",
    device: str = "cpu",
    seed: int = 0,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 512,
    page_size: int = 64,
    pages: int | Literal["auto"] = "auto",
    overflow: Overflow = "refuse",
    note: Callable[[Event], None] | None = None,
    tell: Callable[[str], None] = to_stderr,
) -> Runner:
    """A runner for `model`, with `.model` and `.tokenizer`.

    `dtype` is `float32`, `bfloat16`, `float16` or `auto` (what the files say; bfloat16 for shapes); `weights` and
    `head_weights` (as `weights` unless given) are `dense`, `int8` or `int4` in groups of `weight_group` columns; `lane`
    is `eager`, `inductor`, `triton`, `mlir` or `auto` (the fastest that works here); `compile` is what Inductor
    compiles at once, a `block` or a whole decode `step`; `seed` is for random weights; `note` receives every event of
    the runner, `tell` a line on what takes long in loading.
    """
    if page_size < 1 or (pages != "auto" and pages < 1):
        raise WorkbenchError(f"pages and page_size must be at least 1, not {pages} and {page_size}")
    if overflow not in get_args(Overflow):
        raise WorkbenchError(f"unknown overflow {overflow!r}; known: {', '.join(get_args(Overflow))}")
    torch_dtype = None if dtype == "auto" else parse_dtype(dtype)
    if compile not in get_args(Unit):
        raise WorkbenchError(f"unknown unit of compilation {compile!r}; known: {', '.join(get_args(Unit))}")
    format, place = WeightFormat.of(weights, head_weights, weight_group), _device(device)
    lanes = resolve_lanes(lane, place.type)
    with told_if_long(f"loading the weights of {model}", tell):
        transformer, tokenizer = _transformer(str(model), torch_dtype, lanes.blocks, format, seed, place)
    if lane == AUTO:
        with told_if_long(f"trying which lane decodes {model} fastest here: compiled now, then remembered", tell):
            lanes = measured(lanes, transformer, page_size, compile)
        transformer.run_on(lanes.blocks)
    if compile == "step" and lanes.decode is not Lane.INDUCTOR:
        lanes = replace(lanes, reason=f"{lanes.reason}; compile: step has no effect, since {lanes.decode} decodes")
    limits = Limits(max_num_seqs, max_num_batched_tokens)
    if pages == "auto":
        pages = _pages_that_fit(transformer, limits, page_size)
    heap.trim()
    return Runner(
        transformer,
        tokenizer,
        limits=limits,
        page_size=page_size,
        pages=pages,
        overflow=overflow,
        note=note,
        lanes=lanes,
        compile=compile,
    )


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


def _transformer(
    name: str, dtype: torch.dtype | None, lane: Lane, format: WeightFormat, seed: int, device: torch.device
) -> tuple[Transformer, Tokenizer | None]:
    if name.startswith(SHAPE):
        spec = shapes.named_shape(name.removeprefix(SHAPE))
        format.check(spec)
        state = random_weights(spec, dtype or torch.bfloat16, seed)
        return Transformer.from_state(spec, state, lane, format).to(device), None
    folder = SHIPPED.get(name, Path(name))
    if not folder.is_dir():
        known = ", ".join([*SHIPPED, f"{SHAPE}NAME"])
        raise WorkbenchError(f"no model {name!r}: not a folder here, nor one of {known}{nearest(name, SHIPPED)}")
    spec = families.read_spec(folder)
    format.check(spec)
    state = load_weights(folder, spec, dtype or stored_dtype(folder / "config.json"))
    return Transformer.from_state(spec, state, lane, format).to(device), Tokenizer.from_folder(folder)


def stored_dtype(config: Path) -> torch.dtype:
    """What config.json says, under its new name or its old one; float32 where it says nothing."""
    fields = Fields(read_object(config), str(config))
    key = "torch_dtype" if fields.get("dtype") is None else "dtype"
    name = fields.get(key)
    if name is None:
        return torch.float32
    if not isinstance(name, str) or name.removeprefix("torch.") not in DTYPES:
        raise fields.wrong(key, name, f"one of {', '.join(DTYPES)}; or choose what to load as with dtype=...")
    return parse_dtype(name)


def _pages_that_fit(model: Transformer, limits: Limits, page_size: int) -> int:
    """Pages for every sequence at full context, or as many as the memory set aside holds."""
    wanted = limits.max_num_seqs * pages_for(model.spec.context, page_size)
    page_bytes = page_size * sum(shape.bytes_per_token(model.dtype) for shape in model.cache_shapes())
    return max(1, min(wanted, CACHE_MEMORY // page_bytes))
