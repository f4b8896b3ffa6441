"""Execute eviction: accumulate attention beside the fast kernel, and move the kept tokens together.

    a step:   evictions of its plan  ->  forward, layers observed where a query's attention counts  ->  mass added

An observed layer records its queries, from which attention weights are recomputed beside any kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters, attention_weights
from workbench.batch import TokenBatch
from workbench.errors import WorkbenchError, describe_error
from workbench.kv_cache.codec import SIDES, LoadedCodec
from workbench.kv_cache.codec_layers import CodecLayer
from workbench.kv_cache.eviction import EvictionPolicy
from workbench.kv_cache.pages import Eviction
from workbench.kv_cache.store import DenseLayer, KVStore, SharedLayer
from workbench.model.attention_spec import AttentionSpec
from workbench.model.spec import ModelSpec
from workbench.request import Sequence
from workbench.scheduler.plan import Span, StepPlan

Observable = DenseLayer | CodecLayer | SharedLayer  # layers whose pages are read as dense ones


class AttentionCall:
    """The arguments of one layer's attention in a step."""

    def __init__(self, layer: Observable, q: Tensor, batch: TokenBatch, parameters: AttentionParameters):
        self.layer, self.q, self.batch, self.parameters = layer, q, batch, parameters

    def attention_mass(self, rows: slice, seq: int, end: int) -> Tensor:
        """Return the attention that the queries `rows` give to each slot, by key/value head: [kv_head, slot].

        The queries are the last ones of sequence number `seq`, up to slot `end`.
        """
        context = self.layer.paged(self.batch).gather(seq, end, rows, self.q.dtype)
        weights = attention_weights(self.q[rows], context, self.parameters)
        return weights.double().sum((1, 2))


class ObservedLayer:
    """A layer's cache that records the arguments of its attention."""

    traceable = False  # in a graph the queries could not be seen

    def __init__(self, layer: Observable):
        self.layer, self.group = layer, layer.group
        self.write, self.page_tensors = layer.write, layer.page_tensors
        self._call: AttentionCall | None = None

    def attend(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters, backend: Backend) -> Tensor:
        self._call = AttentionCall(self.layer, q, batch, parameters)
        alone = (
            batch.decode_only and backend is not Backend.INDUCTOR
        )  # outside a graph that backend compiles decodes itself
        return self.layer.attend(q, replace(batch, decode_only=alone), parameters, backend)

    def pop_call(self) -> AttentionCall:
        read, self._call = self._call, None
        if read is None:
            raise WorkbenchError("cache.evict: a custom attention module does not read its cache by `attend`")
        return read


def observe_store(store: KVStore) -> tuple[KVStore, tuple[ObservedLayer, ...]]:
    """Return `store` with its layers observed, and these layers."""
    layers = tuple(ObservedLayer(layer) for layer in store.layers if isinstance(layer, Observable))
    seen = copy.copy(store)
    seen.layers = layers  # type: ignore[assignment] (the layers observed)
    return seen, layers


class Evictor:
    """The attention mass of each sequence's tokens, as [kv_head, slot] for each layer with keys and values of its own,
    from all layers that read them; `policy` chooses for each key/value head."""

    def __init__(self, policy: EvictionPolicy, store: KVStore):
        self.policy, self.store = policy, store
        sources = [index if shape.shared_with is None else shape.shared_with for index, shape in enumerate(store.specs)]
        own = sorted(set(sources))
        self._layers = tuple(cast(DenseLayer | CodecLayer, store.layers[index]) for index in own)  # see check_eviction
        self._read = tuple(own.index(index) for index in sources)  # by each layer, among those
        self._masses: WeakKeyDictionary[Sequence, tuple[int, list[Tensor]]] = WeakKeyDictionary()  # of so many queries

    @torch.inference_mode()
    def evict(self, evictions: Iterable[Eviction]) -> list[tuple[Sequence, str]]:
        """Move the kept tokens to the first slots of their sequence's pages, in text order; return the sequences for
        which the policy failed, with the errors."""
        failed = []
        for sequence, held, kept, pages in evictions:
            masses = self._padded(sequence, held)
            try:
                stays = [torch.stack([self._chosen(group, kept) for group in mass]) for mass in masses]
            except Exception as error:
                failed.append((sequence, describe_error(error)))
                continue
            for layer, slots in zip(self._layers, stays, strict=True):
                _together(_slot_tensors(layer), pages[layer.group], slots, self.store.page_size)
            moved = [mass.gather(1, slots) for mass, slots in zip(masses, stays, strict=True)]
            self._masses[sequence] = self._counted(sequence), moved
        return failed

    def observed_positions(self, span: Span) -> range:
        """Return the positions of `span` whose queries count and were not counted yet; an interrupted step is computed
        again."""
        prompt, observes = span.sequence.prompt_length, self.policy.observes
        first = max(span.start, self._counted(span.sequence))
        if observes is None:
            return range(first, span.end)
        return range(max(first, prompt - observes), max(first, min(span.end, prompt)) if observes else 0)

    def begin_step(self, plan: StepPlan) -> bool:
        """Return whether a step has queries whose attention counts; a text computed from its start counts anew."""
        for span in plan.spans:
            if span.start == 0:
                self._masses.pop(span.sequence, None)
        return any(self.observed_positions(span) for span in plan.spans)

    @torch.inference_mode()
    def add_mass(self, plan: StepPlan, layers: Iterable[ObservedLayer]) -> None:
        """Add the attention of the queries that count, layer by layer."""
        looked = [layer.pop_call() for layer in layers]
        first = 0
        for seq, span in enumerate(plan.spans):
            if votes := self.observed_positions(span):
                rows = slice(first + votes.start - span.start, first + votes.stop - span.start)
                end = votes.stop - span.sequence.num_evicted_tokens
                masses = self._padded(span.sequence, end)
                for place, read in zip(self._read, looked, strict=True):
                    masses[place] += read.attention_mass(rows, seq, end)
                self._masses[span.sequence] = votes.stop, masses
            first += span.length

    def _chosen(self, mass: Tensor, kept: int) -> Tensor:
        slots = self.policy.select(mass, kept)
        if len(slots) != kept:
            message = f"kept {len(slots)} of {len(mass)} tokens, not {kept}"
            raise WorkbenchError(f"cache.evict: {self.policy!r} {message}")
        return slots

    def _counted(self, sequence: Sequence) -> int:
        return self._masses.get(sequence, (0, []))[0]

    def _padded(self, sequence: Sequence, held: int) -> list[Tensor]:
        """Return the mass of the first `held` slots of each layer with its own, in float64."""
        _, masses = self._masses.get(sequence, (0, []))
        if not masses:
            keys = (_slot_tensors(layer)[0] for layer in self._layers)
            masses = [torch.zeros(each.shape[1], 0, dtype=torch.float64, device=each.device) for each in keys]
        return [torch.nn.functional.pad(mass, (0, held - mass.shape[1])) for mass in masses]


class EvictingExecutor:
    """Execute steps whose attention counts by `observing`, over `layers`; all others by `fast`."""

    def __init__(self, fast: Any, observing: Any, layers: tuple[ObservedLayer, ...], evictor: Evictor):
        self.fast, self.observing, self.layers, self.evictor = fast, observing, layers, evictor
        self.kernel_seconds: float | None = None

    @property
    def compiles(self) -> int:
        return max(self.fast.compiles, self.observing.compiles)  # both count the graphs of one process

    @property
    def artifacts(self) -> Mapping[str, str]:
        return self.fast.artifacts

    def forward(self, plan: StepPlan) -> Tensor:
        if not self.evictor.begin_step(plan):
            logits = self.fast.forward(plan)
            self.kernel_seconds = self.fast.kernel_seconds
            return logits
        logits, self.kernel_seconds = self.observing.forward(plan), None
        self.evictor.add_mass(plan, self.layers)
        return logits


def check_eviction(spec: ModelSpec, store: KVStore) -> None:
    """Refuse eviction where it cannot work (WorkbenchError): after it, slots are not positions."""
    for index, (kind, shape) in enumerate(zip(spec.layers, store.specs, strict=True)):
        attention = kind.attention
        if shape.state is not None:
            message = "keeps a state, which has no tokens to evict"
        elif shape.format.quantized:
            message = f"is kept as {shape.format}, in groups of tokens that share their scales; keep it dense"
        elif shape.codec is not None and shape.codec.group is not None:
            message = f"is kept by the {shape.format}, in groups of tokens that share their codes; keep it dense"
        elif shape.codec is not None and not codes_heads_apart(
            shape.codec, shape.num_kv_heads, shape.head_dim, store.dtype
        ):
            message = (
                f"is kept by the {shape.format}, in whose code heads depend on one another, and each keeps tokens of "
                "its own; encode each head by itself"
            )
        elif shape.sliding_window is not None:
            message = (
                f"has a window of {shape.sliding_window}, which bounds it already; evict where every layer sees all"
            )
        elif isinstance(attention, AttentionSpec) and (
            attention.position == "alibi" or attention.mask or attention.score or attention.pages
        ):
            message = "looks by distance (ALiBi, or a custom mask, score or choice of pages), and distances are lost"
        else:
            continue
        raise WorkbenchError(f"cache.evict: layer {index} {message}")


def codes_heads_apart(codec: LoadedCodec, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether a head's code is its own: with the codes of one head exchanged between two tokens, its rows are
    exchanged and no other, bit for bit. Tried on random rows, each head in turn."""
    rows = torch.randn(2, num_kv_heads, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    codec = codec.ready(num_kv_heads, head_dim)
    for side in SIDES:
        stored = codec.encode(rows, side)
        if any(each.shape[1:2] != (num_kv_heads,) for each in stored):
            return False
        decoded = codec.decode(stored, num_kv_heads, head_dim, side)
        for head in range(num_kv_heads):
            moved = codec.decode(tuple(_exchanged(each, head) for each in stored), num_kv_heads, head_dim, side)
            if not torch.equal(moved, _exchanged(decoded, head)):
                return False
    return True


def _exchanged(rows: Tensor, head: int) -> Tensor:
    """Return rows [token, kv_head, ...] of two tokens with one head of each exchanged."""
    found = rows.clone()
    found[:, head] = rows[:, head].flip(0)
    return found


def _slot_tensors(layer: DenseLayer | CodecLayer) -> tuple[Tensor, ...]:
    """Return views [page, kv_head, offset, ...] of all that a slot holds of its token."""
    tensors = layer.page_tensors(layer.group)
    return tuple(each.transpose(1, 2) for each in tensors) if isinstance(layer, CodecLayer) else tensors


def _together(tensors: Iterable[Tensor], pages: list[int], slots: Tensor, size: int) -> None:
    """Move the contents of `slots` [kv_head, kept] of these pages to the first slots, in this order, in each of
    `tensors` [page, kv_head, offset, ...]."""
    targets = torch.arange(slots.shape[1], device=slots.device)
    moved = (slots != targets).any(0)
    slots, targets = slots[:, moved], targets[moved]
    held, group = torch.tensor(pages, device=slots.device), torch.arange(len(slots), device=slots.device)[:, None]
    for tensor in tensors:
        tensor[held[targets // size], group, targets % size] = tensor[held[slots // size], group, slots % size]
