"""Compute the memory of each rank of a model divided among devices: tensor cuts within each stage of a pipeline.

    stage 0: embedding, layers 0 ... i   |   stage 1: layers i ... n, norm, head      (pipeline: 2)
    rank 0 | rank 1: a share of each     |   rank 0 | rank 1: a share of each         (tensor: 2)

Tensor cuts are those of `workbench/tensor_parallel`. Pipelines exist only here and in the simulator: a stage has
consecutive whole layers, and a tied embedding is stored in the first and the last stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from workbench.engine.config import DTYPES, CacheConfig
from workbench.errors import WorkbenchError
from workbench.kv_cache.store import KVStore
from workbench.memory.capacity import meta_kv_store
from workbench.model.memory import (
    KVGroupBytes,
    MemoryEstimate,
    activation_bytes,
    longest_context,
    sum_of_parts,
    weight_bytes_by_parameter,
)
from workbench.model.model_parameters import parameter_shapes
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec
from workbench.tensor_parallel.cut import check_ranks, spec_of_rank
from workbench.tensor_parallel.ranks import rows_per_exchange

FIRST_STAGE_PARAMETERS = ("embedding.", "embedding_norm.", "positions.")  # name prefixes; others are in the last stage
LOGIT_BYTES = 4


@dataclass(frozen=True)
class RankMemory:
    """Memory of rank `rank` of stage `stage`, which has `layers`; `parts` are the bytes per token of these layers in
    each page table."""

    stage: int
    rank: int
    layers: range
    parts: tuple[KVGroupBytes, ...]
    memory: MemoryEstimate
    page_size: int = 1


def stages_of(spec: ModelSpec, pipeline: int) -> tuple[range, ...]:
    """Return the layers of each stage, divided evenly up to one layer.

    Raises:
        WorkbenchError: for more stages than layers, or if stages would exchange more than hidden states.
    """
    count = len(spec.layers)
    if pipeline > count:
        raise WorkbenchError(f"pipeline {pipeline}: {spec.name} has {count} layers, and a stage has at least one")
    found = tuple(range(count * stage // pipeline, count * (stage + 1) // pipeline) for stage in range(pipeline))
    if pipeline == 1:
        return found
    if spec.altup is not None:
        raise WorkbenchError(f"pipeline {pipeline}: the residual streams of {spec.name} are not cut; leave it 1")
    for layers in found:
        for layer in layers:
            source = spec.layers[layer].attention.kv_shared_with
            if source is not None and source not in layers:
                raise WorkbenchError(
                    f"pipeline {pipeline}: layer {layer} of {spec.name} reads the keys and values of layer {source}, "
                    "which another stage has; leave it 1"
                )
    return found


def rank_memories(
    spec: ModelSpec,
    dtype: str,
    format: WeightFormat,
    cache: CacheConfig,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    context: int | None = None,
    batch: int = 1,
    step_tokens: int = 512,
    page_size: int = 1,
    setting: str = "tensor",
) -> tuple[RankMemory, ...]:
    """Return the memory of every rank, stage by stage.

    Args:
        spec: the whole model.
        dtype: name of the dtype of dense weights and a dense cache.
        format: weight format of the matrices.
        cache: format of the cache.
        tensor: ranks that share each layer.
        pipeline: stages of whole layers.
        context: tokens of each sequence; None is the model's maximum.
        batch: sequences.
        step_tokens: tokens of the largest step, which has at least one of each sequence.
        page_size: tokens per page.
        setting: the setting's name of `tensor`, for errors.

    Raises:
        WorkbenchError: if the model cannot be cut this way.
    """
    stages, context = stages_of(spec, pipeline), context or spec.max_position_embeddings
    if tensor > 1:
        check_ranks(spec, format, tensor, setting)
    found, itemsize, known = [], DTYPES[dtype].itemsize, dict[ModelSpec, tuple[dict[str, int], KVStore]]()
    for rank in range(tensor):
        own = spec_of_rank(spec, rank, tensor) if tensor > 1 else spec
        if own not in known:
            known[own] = weight_bytes_by_parameter(own, itemsize, format), meta_kv_store(own, cache, dtype)
        weights, store = known[own]
        shapes = parameter_shapes(own)
        for stage, layers in enumerate(stages):
            names = tuple(_names(own, shapes, layers, stage, len(stages)))
            parts = bytes_of_layers(store, layers)
            last = stage == len(stages) - 1
            rows = activation_bytes(_layers_alone(own, layers), max(step_tokens, batch), itemsize, batch * last)
            if last and tensor > 1 and rank == 0:
                rows += gathered_logits_bytes(spec.vocab_size, tensor, batch)
            found.append(
                RankMemory(stage, rank, layers, parts, MemoryEstimate(
                    context=context,
                    batch=batch,
                    parameters=sum(math.prod(shapes[name]) for name in names),
                    weight_bytes=sum(weights[name] for name in names),
                    activation_bytes=rows,
                    **sum_of_parts(parts, context, page_size),
                ), page_size)
            )  # fmt: skip
    return tuple(sorted(found, key=lambda each: (each.stage, each.rank)))


def gathered_logits_bytes(vocab_size: int, tensor: int, batch: int) -> int:
    """Return the extra bytes of logits on rank 0: the logits gathered from all ranks, and the buffers in which they are
    exchanged, its own and every rank's."""
    widest = -(-vocab_size // tensor)
    rows = min(batch, rows_per_exchange(widest, LOGIT_BYTES))
    return LOGIT_BYTES * (batch * vocab_size + (1 + tensor) * rows * widest)


def _names(
    spec: ModelSpec, shapes: dict[str, tuple[int, ...]], layers: range, stage: int, stages: int
) -> Iterator[str]:
    """Yield the parameters of a stage."""
    for name in shapes:
        if name.startswith("blocks."):
            here = int(name.split(".")[1]) in layers
        elif name == "embedding.weight" and spec.tie_word_embeddings:
            here = stage in (0, stages - 1)
        else:
            here = stage == (0 if name.startswith(FIRST_STAGE_PARAMETERS) else stages - 1)
        if here:
            yield name


def _layers_alone(spec: ModelSpec, layers: range) -> ModelSpec:
    """Return a model of `layers` alone, to compute a step's activations in them."""
    return spec.model_copy(update={"layers": spec.layers[layers.start : layers.stop]})


def bytes_of_layers(store: KVStore, layers: range) -> tuple[KVGroupBytes, ...]:
    """Return for each page table of `layers` the bytes stored per token, or per state; tables of other layers are left
    out."""
    found = []
    for number, table in enumerate(store.groups):
        here = tuple(layer for layer in table.layers if layer in layers)
        tensors = (tensor for layer in here for tensor in store.layers[layer].page_tensors(number))
        size = sum(tensor.nbytes // tensor.shape[0] for tensor in tensors)
        if here:
            own = replace(table, layers=here)
            recurrent = table.is_recurrent
            found.append(KVGroupBytes(own, 0.0, size) if recurrent else KVGroupBytes(own, size / store.page_size))
    return tuple(found)


def ranks_report(found: tuple[RankMemory, ...], memory_bytes: int | None = None) -> dict[str, Any]:
    """Return the ranks in the form of `model memory --json`: the bytes of each rank and their maximum. With
    `memory_bytes` per device, also the number of sequences that fit and their maximum length."""
    rows = [
        {
            "stage": each.stage,
            "rank": each.rank,
            "layers": [each.layers.start, each.layers.stop],
            "parameters": each.memory.parameters,
            "weight_bytes": each.memory.weight_bytes,
            "cache_bytes_per_token": each.memory.cache_bytes_per_token,
            "cache_bytes_per_sequence": each.memory.sequence_bytes,
            "cache_bytes": each.memory.cache_bytes,
            "activation_bytes": each.memory.activation_bytes,
            "total_bytes": each.memory.total_bytes,
        }
        for each in found
    ]
    out: dict[str, Any] = {"ranks": rows, "largest_rank_bytes": max(row["total_bytes"] for row in rows)}
    if memory_bytes is not None:
        out["sequences"] = min(each.memory.max_sequences(memory_bytes) for each in found)
        pages = found[0].page_size
        longest = (longest_context(each.memory, each.parts, memory_bytes, pages) for each in found)
        out["longest_context"] = min((each for each in longest if each is not None), default=None)
    return out
