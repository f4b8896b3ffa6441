"""A model's decode step on the lane mlir: its shapes and weights as the compiled step names them."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from compiled_kernels.decode_step import DecodeStep, LayerShape, StepShape, Weight
from compiled_kernels.mlir_text import TYPES, Target
from workbench.batch import TokenBatch
from workbench.cache.pages import pages_for
from workbench.cache.store import KVStore
from workbench.errors import WorkbenchError
from workbench.model.feedforward import GatedFeedForward
from workbench.model.layers import Attention as AttentionModule
from workbench.model.layers import Block
from workbench.model.parts import Linear
from workbench.model.quantized import Format
from workbench.model.spec import Attention, LayerKind, ModelSpec
from workbench.model.transformer import Transformer

ATTENTION = (
    "heads", "groups", "dim", "window", "sinks", "softcap", "scale", "rotary", "input_bias", "output_bias",
)  # fmt: skip
LAYER = ("attention", "hidden", "feedforward_bias")
FEW = 8  # with fewer rows times groups a thread, the context is split among threads


class MlirStep:
    """The compiled step of one bucket of rows, over a model's own weights and a store's own pages."""

    def __init__(self, model: Transformer, store: KVStore, rows: int):
        if model.dtype not in (torch.float32, torch.bfloat16) or store.dtype != model.dtype:
            kinds = f"{model.dtype} weights and {store.dtype} cache"
            raise WorkbenchError(f"lane mlir: decodes in float32 or bfloat16, one for both, not with {kinds}")
        self.model = model
        tables = {index: table for table, layers in enumerate(model.spec.layer_groups) for index in layers}
        blocks = [cast(Block, block) for block in model.blocks]
        threads = torch.get_num_threads()
        groups = min(block.attention.spec.groups for block in blocks)
        shape = StepShape(
            rows=rows,
            width=model.spec.width,
            vocab=model.spec.vocab,
            eps=model.spec.norm_eps,
            kind=TYPES[model.dtype],
            layers=tuple(_layer(block, tables[index]) for index, block in enumerate(blocks)),
            head=_weight(model.format.head, model.dtype, model.format.group),
            size=store.page_size,
            held=pages_for(model.spec.context, store.page_size),
            chunks=threads if rows * groups < FEW * threads else 1,
            target=Target.here(),
        )
        self.step = DecodeStep(shape, _tensors(model, blocks, store))
        self._tables = {dim: table for (_, dim), table in zip(model.spec.rotary_tables[0], model.rotary, strict=True)}

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Logits of every row of a batch of decodes, float32: [token, vocab]. Overwritten by the next call."""
        step = self.step
        step.x.copy_(self.model.embed(batch.ids))
        step.lengths.copy_(batch.context_lengths)
        for mine, table in zip(step.tables, batch.page_tables, strict=True):
            mine[:, : table.shape[1]] = table
        for turned, angles in step.angles.items():
            for mine, angle in zip(angles, self._tables[turned](batch.positions), strict=True):
                mine.copy_(angle)
        step()
        return self.model.capped(step.logits)


def not_carried_out(spec: ModelSpec) -> str | None:
    """What the step lacks that a model of `spec` needs, in words; None for nothing. Whatever is not named here as known
    must be as it is where nothing is said, so that what a spec learns later is refused until the step learns it."""
    plain = Attention(heads=1, groups=1, dim=2)
    for index, kind in enumerate(spec.layers):
        if not isinstance(kind.attention, Attention):
            return f"{kind.attention.kind} attention (layer {index})"
        for given, right, known in (
            (kind.attention, plain, ATTENTION), (kind, LayerKind(attention=plain, hidden=1), LAYER)
        ):  # fmt: skip
            for name in type(right).model_fields:
                if name not in known and getattr(given, name) != getattr(right, name):
                    return f"{name} {getattr(given, name)} (layer {index})"
    if spec.norm_offset:
        return f"norm_offset {spec.norm_offset}"
    turned = [dim for _, dim in spec.rotary_tables[0]]
    if len(set(turned)) < len(turned):
        return "layers whose heads of one width are turned differently"
    return None


def _layer(block: Block, table: int) -> LayerShape:
    attention, feedforward = cast(AttentionModule, block.attention), cast(GatedFeedForward, block.feedforward)
    spec = attention.spec
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
        attention, feedforward = cast(AttentionModule, block.attention), cast(GatedFeedForward, block.feedforward)
        products = {
            "qkv": attention.qkv,
            "output": attention.output,
            "gate_up": feedforward.gate_up,
            "down": feedforward.down,
        }
        for name, linear in products.items():
            found |= {f"{name}{i}_{index}": tensor for i, tensor in enumerate(linear.tensors)}
        found[f"keys_{index}"], found[f"values_{index}"] = cache.keys, cache.values
    return found
