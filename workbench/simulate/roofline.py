"""Derive step times from a model's shape and the peak rates of hardware: a step takes at least its compute time and its
memory time.

FLOPs and bytes are counted as in `workbench.model.cost`. With tensor parallelism (Shoeybi et al., 2019) each
accelerator does its fraction of the work, and two all-reduces a layer are added: 2 (n - 1) / n of a token's hidden
state over the link for each. Replicated keys and values (fewer heads than accelerators, latents) are read by each
accelerator. Peak rates are dense rates from data sheets: figures with sparsity are halved.

A pipeline (Huang et al., 2019) cuts a step into microbatches that follow each other through the stages; the next step
begins when the last microbatch has left. With m even microbatches, s stages and a fraction c of all layers in the
longest stage, a step takes (1 + (m - 1) c) / m of the sequential compute time, and each microbatch reads a stage's
weights again. Bubbles take (s - 1) / (m + s - 1) of an even pipeline's time. A step uses the number of microbatches
with the least time, at most one per token: a prompt may be cut (Li et al., 2021, TeraPipe), a decode may not. A step
bound by reading weights is not cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from workbench.errors import WorkbenchError, nearest
from workbench.kv_cache.pages import KVCacheGroup
from workbench.model.attention_spec import AnyAttentionSpec, MLASpec
from workbench.model.spec import ModelSpec
from workbench.settings import Settings
from workbench.simulate.step_times import TICKS_PER_SECOND, AttentionReach, LinearCost, StepTimeModel

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
BYTES_PER_VALUE = 2  # bfloat16


class Hardware(Settings):
    """One accelerator. Rates are per second and one way; `source` names the origin of the figures."""

    name: str = "given"
    flops: Rate  # bfloat16 FLOP/s
    bandwidth: Rate  # memory bytes/s
    memory: Rate  # memory size in bytes
    link: Rate = 450e9  # bytes/s to accelerators of the same machine
    network: Rate = 50e9  # bytes/s to another machine
    cpu_link: Rate = 64e9  # bytes/s to CPU memory
    source: str = "given by the user"


def _sheet(name: str, source: str, **figures: float) -> Hardware:
    return Hardware(name=name, source=source, **figures)


HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _sheet(
            "h100", "NVIDIA H100 Tensor Core GPU data sheet, SXM; DGX H100: one 400 Gb/s adapter a GPU",
            flops=989.5e12, bandwidth=3.35e12, memory=80e9, link=450e9, network=50e9, cpu_link=64e9,
        ),
        _sheet(
            "h200", "NVIDIA H200 Tensor Core GPU data sheet, SXM; DGX H200: one 400 Gb/s adapter a GPU",
            flops=989.5e12, bandwidth=4.8e12, memory=141e9, link=450e9, network=50e9, cpu_link=64e9,
        ),
        _sheet(
            "a100", "NVIDIA A100 Tensor Core GPU data sheet, 80 GB SXM; DGX A100: one 200 Gb/s adapter a GPU",
            flops=312e12, bandwidth=2.039e12, memory=80e9, link=300e9, network=25e9, cpu_link=32e9,
        ),
        _sheet(
            "b200", "NVIDIA HGX B200 data sheet: 4.5 PFLOP/s of bfloat16 with sparsity; one 400 Gb/s adapter a GPU",
            flops=2.25e15, bandwidth=7.7e12, memory=180e9, link=900e9, network=50e9, cpu_link=64e9,
        ),
        _sheet(
            "rtx-4090", "NVIDIA Ada GPU architecture whitepaper: products of 16 bits summed in 32; no NVLink, PCIe 4.0",
            flops=165.2e12, bandwidth=1.008e12, memory=24e9, link=32e9, network=3.1e9, cpu_link=32e9,
        ),
        _sheet(
            "m2-ultra", "Apple, M2 Ultra with 76 GPU cores: 27.2 TFLOP/s in float32, 192 GB shared with the processor",
            flops=27.2e12, bandwidth=800e9, memory=192e9, link=10e9, network=1.25e9, cpu_link=800e9,
        ),
    )
}  # fmt: skip


def named_hardware(name: str) -> Hardware:
    """Return the hardware of this name. Raises WorkbenchError for a name that is not in `HARDWARE`."""
    if name not in HARDWARE:
        raise WorkbenchError(f"no hardware {name!r}{nearest(name.lower(), HARDWARE)}; known: {', '.join(HARDWARE)}")
    return HARDWARE[name]


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model in bytes: of its weights, and of one token in each page table of its cache."""

    spec: ModelSpec
    weight_bytes: float
    tables: tuple[KVCacheGroup, ...]
    token_bytes: tuple[float, ...]

    @classmethod
    def dense(cls, spec: ModelSpec, bytes_per_value: float = BYTES_PER_VALUE) -> ModelSizes:
        """Return the sizes of a model whose weights and cache have `bytes_per_value` bytes for each value."""
        tables, token_bytes = [], []
        for layers in spec.kv_cache_groups:
            attention = spec.layers[layers[0]].attention
            tables.append(KVCacheGroup(layers, attention.sliding_window, attention.num_sink_tokens))
            token_bytes.append(len(layers) * attention.cache_values_per_token * bytes_per_value)
        return cls(spec, spec.num_parameters * bytes_per_value, tuple(tables), tuple(token_bytes))

    @property
    def lasting_bytes(self) -> float:
        """Return the cache bytes that a token takes for good, after it has left every residual of recent full-precision
        tokens."""
        late = {layer for table in self.tables if table.is_delayed for layer in table.layers}
        kept = [table.is_delayed or not late.intersection(table.layers) for table in self.tables]
        sizes = zip(self.tables, self.token_bytes, kept, strict=True)
        return sum(size for table, size, counts in sizes if counts and not table.is_recurrent)


def roofline_step_times(
    sizes: ModelSizes,
    hardware: Hardware,
    gpus: int = 1,
    compute_share: float = 1.0,
    memory_share: float = 1.0,
    overhead: float = 0.0,
    pipeline: int = 1,
    microbatches: int | None = None,
) -> StepTimeModel:
    """Return the step times of `gpus` accelerators, or of `pipeline` stages of `gpus` accelerators each.

    Args:
        sizes: Bytes of the model.
        hardware: One accelerator.
        gpus: Number of accelerators.
        compute_share: Fraction of the peak FLOP/s that is reached; 1 is the bound itself.
        memory_share: Fraction of the peak bandwidth that is reached.
        overhead: Seconds added to every step.
        pipeline: Stages of whole layers.
        microbatches: Maximum number of microbatches of a step; None is one per stage.
    """
    spec = sizes.spec
    if any(layer.recurrent is not None for layer in spec.layers):
        raise WorkbenchError(f"{spec.name}: recurrent states are not simulated; use a model with attention layers only")
    flop, byte = (
        TICKS_PER_SECOND / (hardware.flops * compute_share * gpus),
        TICKS_PER_SECOND / (hardware.bandwidth * memory_share * gpus),
    )
    kinds: dict[AttentionReach, dict[AnyAttentionSpec, int]] = {}
    for layer in spec.layers:
        attention = layer.attention
        alike = kinds.setdefault(AttentionReach(attention.sliding_window, attention.num_sink_tokens), {})
        alike[attention] = alike.get(attention, 0) + 1
    blocks = sum(
        k.attention.matrix_parameters(spec.hidden_size) + spec.hidden_size * k.mlp_parameters_per_column[1]
        for k in spec.layers
    )
    blocks += 0 if spec.altup is None else len(spec.layers) * spec.altup.matrix_parameters(spec.hidden_size)
    head = spec.vocab_size * spec.hidden_size
    written, weight = sizes.lasting_bytes, sizes.weight_bytes / spec.num_parameters
    number = written / sum(layer.attention.cache_values_per_token for layer in spec.layers)  # cache bytes per value
    per_link = TICKS_PER_SECOND / hardware.link
    all_reduced = all_reduce_bytes_per_token(spec, gpus) * per_link
    to_next_stage = (pipeline - 1) * spec.hidden_size * BYTES_PER_VALUE * per_link
    read = [sum(n * a.cache_values_read * cache_copies(a, gpus) for a, n in alike.items()) for alike in kinds.values()]
    longest_stage = -(-len(spec.layers) // pipeline) / len(spec.layers)  # fraction of all layers

    def costs(count: int) -> tuple[LinearCost, LinearCost]:
        """Return (compute cost, memory cost) of a step in `count` microbatches."""
        weight_reads = 1 + (count - 1) * longest_stage  # sequential reads of all weights
        per_token = weight_reads / count  # first microbatch in all stages, others in the longest
        sent = all_reduced * per_token + to_next_stage / count
        computing = LinearCost(
            step=round(overhead * TICKS_PER_SECOND),
            prefill_tokens=round(2 * blocks * flop * per_token + sent),
            decode_tokens=round(2 * blocks * flop * per_token + sent),
            num_logits=round(2 * head * flop),
            query_key_pairs=tuple(round(_flops_of(alike) * flop * per_token) for alike in kinds.values()),
        )
        reading = LinearCost(
            step=round(overhead * TICKS_PER_SECOND + blocks * weight * byte * weight_reads),
            prefill_tokens=round(written * byte * per_token + sent),
            decode_tokens=round(written * byte * per_token + sent),
            head=round(head * weight * byte * count),
            positions_read=tuple(round(values * number * byte * per_token) for values in read),
        )
        return computing, reading

    most = (microbatches or pipeline) if pipeline > 1 else 1
    name = f"roofline of {gpus} x {hardware.name}"
    name += f", {pipeline} stages, up to {most} microbatches" if pipeline > 1 else ""
    return StepTimeModel(name, tuple(kinds), costs(1), tuple(costs(count) for count in range(2, most + 1)))


def all_reduce_bytes_per_token(spec: ModelSpec, gpus: int, bytes_per_value: int = BYTES_PER_VALUE) -> float:
    """Return the bytes that each of `gpus` accelerators sends per token: two all-reduces per layer, each of
    2 (n - 1) / n of the hidden state."""
    return 2 * len(spec.layers) * 2 * (gpus - 1) / gpus * spec.hidden_size * bytes_per_value


def cache_copies(attention: AnyAttentionSpec, gpus: int) -> float:
    """Return the number of accelerators, out of `gpus`, that hold each key and value: all for MLA's latent, several if
    there are fewer KV heads than accelerators."""
    if isinstance(attention, MLASpec):
        return gpus
    return max(1.0, gpus / attention.num_kv_heads)


def bubble_share(pipeline: int, microbatches: int | None = None) -> float:
    """Return the fraction of an even pipeline's time in which a stage waits for microbatches (bubbles)."""
    return (pipeline - 1) / ((microbatches or pipeline) + pipeline - 1)


def _flops_of(alike: dict[AnyAttentionSpec, int]) -> float:
    """Return the FLOPs of a query-key pair."""
    return sum(
        2.0 * n * a.num_heads * (a.head_dim + (a.kv_lora_rank if isinstance(a, MLASpec) else a.head_dim))
        for a, n in alike.items()
    )
