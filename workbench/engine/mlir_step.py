"""A model's decode step on the lane mlir: its shapes and weights as the compiled step names them."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from compiled_kernels import Lane
from compiled_kernels.decode_step import DecodeStep, LayerShape, Packing, StepShape, Weight
from compiled_kernels.mlir_text import TYPES, Target
from compiled_kernels.paged_attention import refusal
from compiled_kernels.quantized_attention.mlir_tile import PACKED
from compiled_kernels.quantized_attention.packed import LEVELS
from workbench.batch import TokenBatch
from workbench.cache.pages import pages_for
from workbench.cache.quantized import QuantizedLayer
from workbench.cache.shapes import CacheShape
from workbench.cache.store import KVStore
from workbench.errors import WorkbenchError
from workbench.model.layers import Attention, Block, Linear
from workbench.model.own_parts import mask_of, score_of
from workbench.model.quantized import Format
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer

FEW = 8  # with fewer rows times groups a thread, the context is split among threads


class MlirStep:
    """The compiled step of one bucket of rows, over a model's own weights and a store's own pages."""

    def __init__(self, model: Transformer, store: KVStore, rows: int):
        if model.dtype not in (torch.float32, torch.bfloat16) or store.dtype != model.dtype:
            kinds = f"{model.dtype} weights and {store.dtype} cache"
            raise WorkbenchError(f"lane mlir: decodes in float32 or bfloat16, one for both, not with {kinds}")
        if problem := step_problem(model.spec) or store_problem(store):
            raise WorkbenchError(f"lane mlir: decodes no step of {model.spec.name}: {problem}")
        self.model, self.store = model, store
        blocks = [cast(Block, block) for block in model.blocks]
        threads = torch.get_num_threads()
        groups = min(block.attention.spec.groups for block in blocks)
        shape = StepShape(
            rows=rows,
            width=model.spec.width,
            vocab=model.spec.vocab,
            eps=model.spec.norm_eps,
            kind=TYPES[model.dtype],
            layers=tuple(_layer(block, store.shapes[i], model.turns[i]) for i, block in enumerate(blocks)),
            head=_weight(model.format.head, model.dtype, model.format.group),
            size=store.page_size,
            held=pages_for(model.spec.context, store.page_size),
            chunks=threads if rows * groups < FEW * threads else 1,
            target=Target.here(),
        )
        self.step = DecodeStep(shape, _tensors(model, blocks, store))

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Logits of every row of a batch of decodes, float32: [token, vocab]. Overwritten by the next call."""
        step = self.step
        self.store.settle(batch)
        step.x.copy_(self.model.embed(batch.ids))
        step.lengths.copy_(batch.context_lengths)
        for mine, table in zip(step.tables, batch.page_tables, strict=True):
            mine[:, : table.shape[1]] = table
        for turn, (cos, sin) in step.angles.items():
            for mine, angle in zip((cos, sin), self.model.rotary[turn](batch.positions), strict=True):
                mine.copy_(angle)
        step()
        return step.logits


def step_problem(spec: ModelSpec) -> str | None:
    """Why a decode step of `spec` cannot be one MLIR function; None where it can."""
    for index, kind in enumerate(spec.layers):
        attention = kind.attention
        if attention.module is not None:
            return f"layer {index} has an attention module of the user's own"
        if problem := refusal(Lane.MLIR, mask_of(attention), score_of(attention)):
            return f"layer {index}: {problem}"
        if attention.dim % 2:
            return f"layer {index} has heads of odd width {attention.dim}"
    return None


def store_problem(store: KVStore) -> str | None:
    """Why a decode step cannot read and write `store` within one MLIR function; None where it can."""
    for index, shape in enumerate(store.shapes):
        if not shape.format.packed:
            continue
        if not set(shape.format.kinds) <= set(LEVELS):
            return f"layer {index}: a compiled step reads INT8 and INT4 pages, not {shape.format}"
        if shape.format.rotate:
            return f"layer {index}: a compiled step does not rotate heads"
    return None


def _layer(block: Block, cache: CacheShape, turn: int | None) -> LayerShape:
    attention = cast(Attention, block.attention)
    spec, feedforward = attention.spec, block.feedforward
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
        window=spec.window or 0,
        sinks=spec.sinks,
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
    return _weight(linear.format, linear.weight.dtype, linear.group, linear.bias is not None)


def _weight(format: Format, dtype: torch.dtype, group: int, bias: bool = False) -> Weight:
    kind = {"int8": "i8", "int4": "i4"}.get(format, TYPES[dtype])
    return Weight(kind, group if format == "int4" else 0, bias)


def _tensors(model: Transformer, blocks: list[Block], store: KVStore) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {"norm": model.norm.weight}
    found |= {f"head_{i}": tensor for i, tensor in enumerate(model.head_tensors)}
    for index, (block, cache) in enumerate(zip(blocks, store.layers, strict=True)):
        found[f"attention_norm_{index}"] = block.attention_norm.weight
        found[f"feedforward_norm_{index}"] = block.feedforward_norm.weight
        products = {
            "qkv": block.attention.qkv,
            "output": block.attention.output,
            "gate_up": block.feedforward.gate_up,
            "down": block.feedforward.down,
        }
        for name, linear in products.items():
            found |= {f"{name}{i}_{index}": tensor for i, tensor in enumerate(linear.tensors)}
        attention = block.attention
        if attention.query_norm is not None and attention.key_norm is not None:
            found[f"query_norm_{index}"] = attention.query_norm.weight
            found[f"key_norm_{index}"] = attention.key_norm.weight
        if attention.sink_logits is not None:
            found[f"sink_logits_{index}"] = attention.sink_logits.float()
        if isinstance(cache, QuantizedLayer):
            packed = zip(PACKED, (*cache.keys.tensors, *cache.values.tensors), strict=True)
            found |= {f"{name}_{index}": tensor for name, tensor in packed}
            found[f"keys_{index}"], found[f"values_{index}"] = cache.recent_keys, cache.recent_values
        else:
            found[f"keys_{index}"], found[f"values_{index}"] = cache.keys, cache.values
    return found
