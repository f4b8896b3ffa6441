"""A model's decode step on the lane mlir: its shapes and weights as the compiled step names them."""

from __future__ import annotations

import time
from typing import cast

import torch
from torch import Tensor

from compiled_kernels.decode_step import DecodeStep, LayerShape, StepShape, Weight
from compiled_kernels.lanes import LaneError
from compiled_kernels.masks import band
from compiled_kernels.mlir_text import TYPES, Target
from workbench.batch import TokenBatch
from workbench.cache.pages import pages_for
from workbench.cache.store import KVStore
from workbench.engine.packing import LEAST_TABLE
from workbench.errors import WorkbenchError
from workbench.model.layers import Attention, Block, Linear
from workbench.model.quantized import Format
from workbench.model.transformer import Transformer

FEW = 8  # with fewer rows times groups a thread, the context is split among threads


class MlirStep:
    """The compiled step of one bucket of rows, over a model's own weights and a store's own pages."""

    def __init__(self, model: Transformer, store: KVStore, rows: int):
        if model.device.type != "cpu":
            raise WorkbenchError(f"lane mlir: decodes on the CPU, and the model is on {model.device}")
        if model.dtype not in (torch.float32, torch.bfloat16) or store.dtype != model.dtype:
            kinds = f"{model.dtype} weights and {store.dtype} cache"
            raise WorkbenchError(f"lane mlir: decodes in float32 or bfloat16, one for both, not with {kinds}")
        for part in model.blocks.modules():
            if part is not model.blocks and type(part).__module__ != Block.__module__:
                remedy = "load the model on lane inductor or eager"
                raise LaneError(f"lane mlir: does not know how to decode with a {type(part).__name__}; {remedy}")
        self.model, self.seconds = model, 0.0  # of the last call's compiled code
        blocks = [cast(Block, block) for block in model.blocks]
        self.step = DecodeStep(step_shape(model, store.page_size, rows), _tensors(model, blocks, store))

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Logits of every row of a batch of decodes, float32: [token, vocab]. Overwritten by the next call."""
        step = self.step
        step.x.copy_(self.model.embed(batch.ids))
        step.lengths.copy_(batch.context_lengths)
        for mine, table in zip(step.tables, batch.page_tables, strict=True):
            mine[:, : table.shape[1]] = table
        for dim, (cos, sin) in step.angles.items():
            for mine, angle in zip((cos, sin), self.model.rotary[str(dim)](batch.positions), strict=True):
                mine.copy_(angle)
        began = time.perf_counter()
        step()
        self.seconds = time.perf_counter() - began
        return step.logits

    @property
    def artifact(self) -> str:
        """The content hash of the code that runs (see compiled_kernels/mlir/artifacts.py)."""
        return self.step.kernel.digest


def step_shape(model: Transformer, page_size: int, rows: int) -> StepShape:
    """What the step of `rows` is compiled for; of the model only shapes and types are read."""
    tables = {index: table for table, layers in enumerate(model.spec.layer_groups) for index in layers}
    blocks = [cast(Block, block) for block in model.blocks]
    threads = torch.get_num_threads()
    groups = min(block.attention.spec.groups for block in blocks)
    return StepShape(
        rows=rows,
        width=model.spec.width,
        vocab=model.spec.vocab,
        eps=model.spec.norm_eps,
        kind=TYPES[model.dtype],
        layers=tuple(_layer(block, tables[index]) for index, block in enumerate(blocks)),
        head=_weight(model.format.head, model.dtype, model.format.group),
        size=page_size,
        held=max(LEAST_TABLE, pages_for(model.spec.context, page_size)),
        chunks=threads if rows * groups < FEW * threads else 1,
        target=Target.here(),
    )


def _layer(block: Block, table: int) -> LayerShape:
    attention = cast(Attention, block.attention)
    spec, feedforward = attention.spec, block.feedforward
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
        table=table,
    )


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
        found[f"keys_{index}"], found[f"values_{index}"] = cache.keys, cache.values
    return found
