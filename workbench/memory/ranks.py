"""Memory of each rank of a model that several devices share: tensor cuts within each stage of a pipeline.

    stage 0: embedding, layers 0 ... i   |   stage 1: layers i ... n, norm, head      (pipeline: 2)
    rank 0 | rank 1: a share of each     |   rank 0 | rank 1: a share of each         (tensor: 2)

Tensor cuts are those that `workbench/tensor_parallel` makes. A pipeline is here, and in the simulator, alone: a stage
has whole layers, one after the other, and a tied embedding lies in the first stage and in the last.
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

FIRST_STAGE_PARAMETERS = ("embedding.", "embedding_norm.", "positions.")  # by prefix; the last stage has those left
LOGIT_BYTES = 4


@dataclass(frozen=True)
class RankMemory:
    """Memory of rank `rank` of stage `stage`, which has `layers`; `parts` are what its layers store of a token."""

    stage: int
    rank: int
    layers: range
    parts: tuple[KVGroupBytes, ...]
    memory: MemoryEstimate
    page_size: int = 1


def stages_of(spec: ModelSpec, pipeline: int) -> tuple[range, ...]:
    """Return the layers of each stage: as many in each, or one more.

    Raises:
        WorkbenchError: for more stages than layers, and for what would have to travel between stages beside the rows.
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
        dtype: name of the type of dense weights, and of a dense cache.
        format: storage of the matrices.
        cache: format of the cache.
        tensor: ranks that share each layer.
        pipeline: stages of whole layers.
        context: tokens of each sequence; None is the model's maximum.
        batch: sequences.
        step_tokens: tokens that the largest step computes, or one of each sequence.
        page_size: tokens of a page.
        setting: what `tensor` is called where it is given, for errors.

    Raises:
        WorkbenchError: where the model cannot be cut so.
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
    """Return what rank 0 holds of logits beside its own: those of all ranks, and some rows as they are exchanged, its
    own and every rank's."""
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
    """Return a model of some layers, for the rows that a step has in them."""
    return spec.model_copy(update={"layers": spec.layers[layers.start : layers.stop]})


def bytes_of_layers(store: KVStore, layers: range) -> tuple[KVGroupBytes, ...]:
    """Return the bytes that each table stores of a token, or of a state, in some layers; tables of others are left
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
    """Return what `workbench memory --json` prints of ranks: each one's bytes, and the most of one; in `memory_bytes`
    of each device, how many sequences fit, and how long they may be."""
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
