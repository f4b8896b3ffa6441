"""Bind a model's decode step to the backend mlir: shapes and weights as the compiled step names them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from compiled_kernels import Lane
from compiled_kernels.blocked import in_panels, words
from compiled_kernels.decode_step import DecodeStep, LayerShape, Packing, StepShape, Weight
from compiled_kernels.lanes import LaneError
from compiled_kernels.masks import band
from compiled_kernels.mlir_text import TYPES, Target
from compiled_kernels.paged_attention import refusal
from compiled_kernels.quantized_attention.mlir_tile import PACKED
from compiled_kernels.quantized_attention.packed import SCALED
from workbench.cache.pages import NULL_PAGE, pages_for
from workbench.cache.quantized import QuantizedLayer
from workbench.cache.shapes import CacheShape
from workbench.cache.store import KVStore
from workbench.engine.angles import Angles
from workbench.engine.contention import StepThreads
from workbench.engine.packing import LEAST_TABLE, pack
from workbench.engine.plan import StepPlan
from workbench.errors import WorkbenchError
from workbench.model.feedforward import GatedFeedForward
from workbench.model.layers import Attention as AttentionModule
from workbench.model.layers import Block
from workbench.model.own_parts import mask_of, score_of
from workbench.model.parts import Linear
from workbench.model.quantized import Format
from workbench.model.rotary import RotaryTable
from workbench.model.rotary_spec import Value
from workbench.model.spec import Attention, ModelSpec
from workbench.model.transformer import Transformer

# Fields of a spec that the step supports, or that are handled before it is reached.
ATTENTION = (
    "kind", "heads", "groups", "dim", "window", "sinks", "softcap", "scale", "qk_norm", "position", "rotary",
    "sink_logits", "mask", "score", "module", "input_bias", "output_bias",
)  # fmt: skip
LAYER = ("attention", "hidden", "feedforward_bias")
MODEL = (
    "name", "vocab", "width", "layers", "context", "rotary", "norm_eps", "embedding_scale", "final_softcap", "tied",
    "end_ids",
)  # fmt: skip
OURS = ("workbench.model.layers", "workbench.model.parts", "workbench.model.feedforward", "torch.nn.modules.linear")
FEW = 8  # with fewer rows x KV heads per thread, the context is split among threads


class MlirStep:
    """The compiled step of one bucket of rows, over a model's weights and a store's pages."""

    def __init__(
        self,
        model: Transformer,
        store: KVStore,
        rows: int,
        together: bool = False,
        threads: StepThreads | None = None,
    ):
        """With `together` several rows may be of one sequence, each with its own length. `threads` runs the step."""
        check_step(model, store)
        self.model, self.store, self.seconds = model, store, 0.0  # of the last call's compiled code
        shape = step_shape(model, store.page_size, rows, store.shapes, together)
        self.step = DecodeStep(shape, step_tensors(model, store))
        self._name, self._threads = f"{'check' if together else 'decode'} {rows}", threads or StepThreads()
        self._angles = {turn: Angles(cast(RotaryTable, model.rotary[turn])) for turn in self.step.angles}
        self._ids = torch.zeros(rows, dtype=torch.long)
        # Written to through numpy: a small step is over before torch has made a handful of small tensors.
        self._fields = [each.numpy() for each in (self._ids, self.step.lengths, *self.step.tables)]

    def __call__(self, plan: StepPlan) -> Tensor:
        """Return logits of every row of a plan of one token each, float32: [row, vocab]. The next call
        overwrites them."""
        step, spans = self.step, plan.spans
        if self.store.lag is not None:
            self.store.settle(pack(plan, self.store.page_size, self.model.device))
        rows, (ids, lengths, *tables) = len(spans), self._fields
        ids[:rows] = [span.ids[0] for span in spans]
        lengths[:rows] = [span.end - span.sequence.evicted for span in spans]
        lengths[rows:] = 1
        for t, table in enumerate(tables):
            for row, span in enumerate(spans):
                pages = span.sequence.pages[t]
                table[row, : len(pages)] = pages
            table[rows:, 0] = NULL_PAGE
        step.x.copy_(self.model.embed(self._ids))
        positions = torch.tensor([span.start for span in spans])
        for turn, mine in step.angles.items():
            for part, angle in zip(mine, self._angles[turn](positions), strict=True):
                part[:rows] = angle
        self.seconds = self._threads.run(self._name, step)
        return self.model.capped(step.logits)

    @property
    def artifact(self) -> str:
        """Return the content hash of the code that runs (see compiled_kernels/mlir/artifacts.py)."""
        return self.step.kernel.digest


def check_step(model: Transformer, store: KVStore) -> None:
    """Check that a step can be compiled; raise WorkbenchError or LaneError otherwise."""
    if model.device.type != "cpu":
        raise WorkbenchError(f"lane mlir: decodes on the CPU, and the model is on {model.device}")
    if model.dtype not in (torch.float32, torch.bfloat16) or store.dtype != model.dtype:
        kinds = f"{model.dtype} weights and {store.dtype} cache"
        raise WorkbenchError(f"lane mlir: decodes in float32 or bfloat16, one for both, not with {kinds}")
    if problem := step_problem(model.spec) or store_problem(store.shapes):
        raise WorkbenchError(f"lane mlir: decodes no step of {model.spec.name}: {problem}")
    for part in model.blocks.modules():
        if part is not model.blocks and type(part).__module__ not in OURS:
            remedy = "load the model on lane inductor or eager"
            raise LaneError(f"lane mlir: does not know how to decode with a {type(part).__name__}; {remedy}")


def step_shape(
    model: Transformer,
    page_size: int,
    rows: int,
    cache: tuple[CacheShape, ...] | None = None,
    together: bool = False,
) -> StepShape:
    """Return the compile-time shape of a step of `rows`, over a dense cache unless given."""
    cache = cache or model.cache_shapes()
    blocks = [cast(Block, block) for block in model.blocks]
    threads = torch.get_num_threads()
    groups = min(kind.attention.groups for kind in model.spec.layers)
    return StepShape(
        rows=rows,
        width=model.spec.width,
        vocab=model.spec.vocab,
        eps=model.spec.norm_eps,
        kind=TYPES[model.dtype],
        layers=tuple(_layer(block, cache[i], model.turns[i]) for i, block in enumerate(blocks)),
        head=_head(model),
        size=page_size,
        held=max(LEAST_TABLE, pages_for(model.spec.context, page_size)),
        chunks=threads if rows * groups < FEW * threads else 1,
        target=Target.here(),
        together=together,
    )


def step_problem(spec: ModelSpec) -> str | None:
    """Return why a decode step of `spec` cannot be one MLIR function; None if it can."""
    for index, kind in enumerate(spec.layers):
        attention = kind.attention
        if not isinstance(attention, Attention):
            return f"layer {index} has {attention.kind} attention, which the compiled decode step has not"
        if attention.module is not None:
            return f"layer {index} has an attention module of the user's own"
        if problem := refusal(Lane.MLIR, mask_of(attention), score_of(attention)):
            return f"layer {index}: {problem}"
        if attention.dim % 2:
            return f"layer {index} has heads of odd width {attention.dim}"
        if problem := _unknown(attention, ATTENTION) or _unknown(kind, LAYER):
            return f"layer {index} has {problem}, which the compiled decode step has not"
    return _unknown(spec, MODEL)


def _unknown(given: Value, known: Iterable[str]) -> str | None:
    """Return a field that is not `known` and not at its default: a new feature is refused until the step
    supports it."""
    for name, field in type(given).model_fields.items():
        if name not in known and getattr(given, name) != field.default:
            return f"{name} {getattr(given, name)}"
    return None


def store_problem(shapes: Iterable[CacheShape]) -> str | None:
    """Return why a decode step cannot use a cache of these specs within one MLIR function; None if it can."""
    for index, shape in enumerate(shapes):
        if not shape.format.packed:
            continue
        if not set(shape.format.kinds) <= set(SCALED):
            return f"layer {index}: a compiled step reads keys and values that are both packed, not {shape.format}"
        if shape.format.rotate:
            return f"layer {index}: a compiled step does not rotate heads"
    return None


def _layer(block: Block, cache: CacheShape, turn: int | None) -> LayerShape:
    attention, feedforward = cast(AttentionModule, block.attention), cast(GatedFeedForward, block.feedforward)
    spec = attention.spec
    window, sinks = band(attention.mask, "mlir")
    return LayerShape(
        heads=spec.heads,
        groups=spec.groups,
        dim=spec.dim,
        hidden=feedforward.down.width,
        scale=attention.scale,
        qkv=_stored(attention.qkv),
        output=_stored(attention.output),
        gate_up=_stored(feedforward.gate_up),
        down=_stored(feedforward.down),
        window=window,
        sinks=sinks,
        softcap=spec.softcap,
        sink_logits=spec.sink_logits,
        qk_norm=spec.qk_norm,
        turn=turn,
        table=cache.recent if cache.format.packed else cache.table,
        packing=_packing(cache) if cache.format.packed else None,
    )


def _packing(cache: CacheShape) -> Packing:
    keys, values = cache.format.kinds
    columns, rule = min(cache.format.columns, cache.dim), cache.rule
    return Packing(keys, values, rule.group, columns, rule.lag, rule.first, cache.table)


def _stored(linear: Linear) -> Weight:
    weight = _weight(linear.format, linear.weight.dtype, linear.group, linear.bias is not None)
    return replace(weight, panels=in_panels(linear.weight), w8a8=linear.activations == "int8")


def _head(model: Transformer) -> Weight:
    format = model.format
    weight = _weight(format.head, model.dtype, format.group)
    return replace(weight, w8a8=format.activations_of(format.head) == "int8")


def _weight(format: Format, dtype: torch.dtype, group: int, bias: bool = False) -> Weight:
    kind = {"int8": "i8", "int4": "i4"}.get(format, TYPES[dtype])
    return Weight(kind, group if format == "int4" else 0, bias)


def step_tensors(model: Transformer, store: KVStore) -> dict[str, Tensor]:
    """Weights and pages by the names that a step gives them."""
    blocks = [cast(Block, block) for block in model.blocks]
    found: dict[str, Tensor] = {"norm": model.norm.weight}
    found |= {f"head_{i}": tensor for i, tensor in enumerate(model.head_tensors)}
    for index, (block, cache) in enumerate(zip(blocks, store.layers, strict=True)):
        found[f"attention_norm_{index}"] = block.attention_norm.weight
        found[f"feedforward_norm_{index}"] = block.feedforward_norm.weight
        attention, feedforward = cast(AttentionModule, block.attention), cast(GatedFeedForward, block.feedforward)
        products = {
            "qkv": attention.qkv,
            "output": attention.output,
            "gate_up": feedforward.gate_up,
            "down": feedforward.down,
        }
        for name, linear in products.items():
            found |= {f"{name}{i}_{index}": _stored_words(tensor) for i, tensor in enumerate(linear.tensors)}
        if attention.query_norm is not None and attention.key_norm is not None:
            found[f"query_norm_{index}"] = attention.query_norm.weight
            found[f"key_norm_{index}"] = attention.key_norm.weight
        if attention.sink_logits is not None:
            found[f"sink_logits_{index}"] = attention.sink_logits.float()
        if isinstance(cache, QuantizedLayer):
            packed = zip(PACKED, (*cache.keys.three, *cache.values.three), strict=True)
            found |= {f"{name}_{index}": _words(tensor) for name, tensor in packed}
            found[f"keys_{index}"], found[f"values_{index}"] = cache.recent_keys, cache.recent_values
        else:
            found[f"keys_{index}"], found[f"values_{index}"] = cache.keys, cache.values
    return found


def _stored_words(tensor: Tensor) -> Tensor:
    """A weight in panels as the words that the step reads; all others as they are."""
    return words(tensor) if in_panels(tensor) else tensor


def _words(part: Tensor) -> Tensor:
    """Codes, four bytes in a row, as the words that the step reads; scales and minima as they are."""
    return part.view(torch.int32)[..., 0] if part.dtype == torch.uint8 else part
