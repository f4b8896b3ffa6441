"""Step times from a model's shape and a machine's ceilings: a step takes at least its computing and its reading time.

FLOPs and bytes are counted as in `workbench.model.cost`. With tensor parallelism (Shoeybi et al., 2019) each
accelerator does its fraction of the work, and two all-reduces a layer are added: 2 (n - 1) / n of a token's hidden
state over the link for each."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.cache.tables import Table
from workbench.fleet.hardware import Hardware
from workbench.fleet.work import SECOND, Form, Seen, StepTimes
from workbench.model.latent_spec import LatentAttention
from workbench.model.spec import AnyAttention, ModelSpec

VALUE = 2  # bytes of a bfloat16


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model: its weights, and a token in each table of its cache."""

    spec: ModelSpec
    weight_bytes: float
    tables: tuple[Table, ...]
    token_bytes: tuple[float, ...]

    @classmethod
    def dense(cls, spec: ModelSpec, value: float = VALUE) -> Sizes:
        """Build the sizes of a model with `bytes_per_value` bytes a number in weights and cache."""
        tables, token_bytes = [], []
        for layers in spec.layer_groups:
            attention = spec.layers[layers[0]].attention
            tables.append(Table(layers, attention.window, attention.sinks))
            token_bytes.append(len(layers) * attention.cached * value)
        return cls(spec, spec.parameters * value, tuple(tables), tuple(token_bytes))

    @property
    def lasting_bytes(self) -> float:
        """Return the bytes of a token once it has left every residual."""
        late = {layer for table in self.tables if table.late for layer in table.layers}
        kept = [table.late or not late.intersection(table.layers) for table in self.tables]
        return sum(size for size, counts in zip(self.token_bytes, kept, strict=True) if counts)


def roofline(
    sizes: Sizes,
    hardware: Hardware,
    gpus: int = 1,
    compute_share: float = 1.0,
    memory_share: float = 1.0,
    overhead: float = 0.0,
) -> StepTimes:
    """Return the step times of `gpus` accelerators.

    Args:
        sizes: Bytes of the model.
        hardware: One accelerator.
        gpus: Number of accelerators.
        compute_share: Fraction of the peak FLOP/s that is reached; 1 is the bound itself.
        memory_share: Fraction of the peak bandwidth that is reached.
        overhead: Seconds added to every step.
    """
    spec = sizes.spec
    flop, byte = SECOND / (hardware.flops * compute_share * gpus), SECOND / (hardware.bandwidth * memory_share * gpus)
    kinds: dict[Seen, dict[AnyAttention, int]] = {}
    for layer in spec.layers:
        attention = layer.attention
        alike = kinds.setdefault(Seen(attention.window, attention.sinks), {})
        alike[attention] = alike.get(attention, 0) + 1
    blocks = sum(k.attention.matrices(spec.width) + spec.width * k.feedforward_matrices[1] for k in spec.layers)
    head = spec.vocab * spec.width
    written, weight = sizes.lasting_bytes, sizes.weight_bytes / spec.parameters
    number = written / sum(layer.attention.cached for layer in spec.layers)  # bytes of one in the cache
    sent = 2 * len(spec.layers) * 2 * (gpus - 1) / gpus * spec.width * VALUE * SECOND / hardware.link
    computing = Form(
        step=round(overhead * SECOND),
        prefill=round(2 * blocks * flop + sent),
        decode=round(2 * blocks * flop + sent),
        sampled=round(2 * head * flop),
        pairs=tuple(round(_flops_of(alike) * flop) for alike in kinds.values()),
    )
    reading = Form(
        step=round(overhead * SECOND + blocks * weight * byte),
        prefill=round(written * byte + sent),
        decode=round(written * byte + sent),
        head=round(head * weight * byte),
        read=tuple(
            round(sum(n * attention.cached for attention, n in alike.items()) * number * byte)
            for alike in kinds.values()
        ),
    )
    return StepTimes(f"roofline of {gpus} x {hardware.name}", tuple(kinds), (computing, reading))


def _flops_of(alike: dict[AnyAttention, int]) -> float:
    """Return the FLOPs of a query-key pair."""
    return sum(
        2.0 * n * a.heads * (a.dim + (a.latent if isinstance(a, LatentAttention) else a.dim)) for a, n in alike.items()
    )
