"""Execute eviction: sum the attention that each token receives, beside the fast kernel, and move the kept tokens
together.

    a step:   evictions of its plan  ->  forward, with observed layers if a query's attention counts  ->  mass added

An observed layer records its queries, and attention weights are recomputed from them for any kernel.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters, attend, attention_weights
from workbench.batch import TokenBatch
from workbench.errors import WorkbenchError, describe_error
from workbench.kv_cache.attention_layers import AttentionLayer
from workbench.kv_cache.budget import EvictionBudget
from workbench.kv_cache.codec import SIDES, LoadedCodec
from workbench.kv_cache.evicted_slots import SlotChange, move_slots, read_slots
from workbench.kv_cache.eviction import AnyPolicy, LayerTokens, select_slots
from workbench.kv_cache.layer import CacheLayer, LayerView
from workbench.kv_cache.pages import Eviction
from workbench.kv_cache.store import KVStore
from workbench.model.attention_spec import AttentionSpec
from workbench.model.spec import ModelSpec
from workbench.request import Sequence
from workbench.scheduler.plan import Span, StepPlan


class AttentionCall(NamedTuple):
    """The arguments with which one layer's attention was called in a step."""

    layer: CacheLayer
    q: Tensor
    batch: TokenBatch
    parameters: AttentionParameters

    def attention_mass(self, rows: slice, seq: int, end: int, decay: float = 1.0) -> Tensor:
        """Return the attention that the queries `rows` give to each slot, by key/value head: [kv_head, slot].

        The queries are the last ones of sequence number `seq`, up to slot `end`. Each multiplies the earlier mass by
        `decay`.
        """
        context = self.layer.read(self.q, self.batch, self.parameters).gather(seq, end, rows, self.q.dtype)
        weights = attention_weights(self.q[rows], context, self.parameters).double()
        if decay != 1:
            after = torch.arange(rows.stop - rows.start - 1, -1, -1, device=weights.device, dtype=weights.dtype)
            weights = weights * (decay**after)[:, None]
        return weights.sum((1, 2))


class ObservedLayer(LayerView):
    """A wrapper of one layer's cache that records the arguments of attention calls.

    `visible` masks the slots that each head sees of each sequence in the step, [kv_head, slot]; None for all. Every
    head sees the slots after these.
    """

    def __init__(self, source: CacheLayer):
        super().__init__(source)
        self._call: AttentionCall | None = None
        self.visible: list[Tensor | None] = []

    def attend(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters, backend: Backend) -> Tensor:
        self._call = AttentionCall(self.source, q, batch, parameters)
        if any(each is not None for each in self.visible):
            return self._attend_to_visible(q, batch, parameters)
        alone = (
            batch.decode_only and backend is not Backend.INDUCTOR
        )  # outside of a graph, that backend compiles decodes by itself
        return super().attend(q, replace(batch, decode_only=alone), parameters, backend)

    def _attend_to_visible(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters) -> Tensor:
        """Attend sequence by sequence, each head to its own kept slots; a reference implementation like the backend
        eager.
        """
        out, pages = torch.zeros_like(q), self.read(q, batch, parameters)
        for (seq, rows, context), visible in zip(batch.spans.listed(), self.visible, strict=False):
            read = pages.gather(seq, context, rows)
            if visible is not None:
                shown = torch.nn.functional.pad(visible, (0, context - visible.shape[1]), value=True)
                read = read._replace(chosen=shown[:, None, None])  # kv_head 1 1 read
            out[rows] = attend(q[rows], read, parameters)
        return out[..., : self.num_value_columns]

    def pop_call(self) -> AttentionCall:
        read, self._call = self._call, None
        if read is None:
            raise WorkbenchError("cache.evict: a custom attention module does not read its cache by `attend`")
        return read


class Evictor:
    """The executor of evictions. It has the attention mass of each sequence's tokens: [kv_head, slot] for each layer
    with its own keys and values, summed over all layers that read them. `policy` chooses the tokens of each key/value
    head.

    If heads keep different numbers of tokens, a head's tokens are in its first slots, and it does not see its other
    slots up to the sequence's number of slots after the eviction.
    """

    def __init__(self, policy: AnyPolicy, store: KVStore, budget: EvictionBudget):
        self.policy, self.store, self.budget, self.uneven = policy, store, budget, budget.spread > 1
        self._decay = float(getattr(policy, "decay", 1.0))
        sources = [index if shape.shared_with is None else shape.shared_with for index, shape in enumerate(store.specs)]
        own = sorted(set(sources))
        layers = (store.layers[index] for index in own)
        self._layers = tuple(layer for layer in layers if isinstance(layer, AttentionLayer))  # all: why_not_evictable
        self._read = tuple(own.index(index) for index in sources)  # by layer, index among these
        self._masses: WeakKeyDictionary[Sequence, tuple[int, list[Tensor]]] = WeakKeyDictionary()
        self._visible: WeakKeyDictionary[Sequence, list[Tensor]] = WeakKeyDictionary()

    @torch.inference_mode()
    def evict(self, evictions: Iterable[Eviction]) -> list[tuple[Sequence, str]]:
        """Move the kept tokens to the first slots of their sequence's pages, in text order; return the sequences whose
        policy failed, with the errors.
        """
        failed = []
        for eviction in evictions:
            try:
                self._evict(eviction)
            except Exception as error:
                failed.append((eviction.sequence, describe_error(error)))
        return failed

    def _evict(self, eviction: Eviction) -> None:
        sequence, held, kept, pages = eviction
        masses, size = self._padded(sequence, held), self.store.page_size
        budget = self.budget.tokens_after_eviction(sequence.prompt_length)
        chosen = [self._choose(number, mass, pages, kept, budget) for number, mass in enumerate(masses)]
        if self.uneven:
            share = sum(int(keep.sum()) for keep, _ in chosen) / sum(len(keep) for keep, _ in chosen)
            if share > budget:
                message = f"heads kept {share:.1f} tokens on average where {budget} may be"
                raise WorkbenchError(f"cache.evict: {self.policy!r} {message}")
        moved, visible = [], []
        for layer, mass, (keep, change) in zip(self._layers, masses, chosen, strict=True):
            # Kept tokens first, in text order; a head that keeps fewer has other tokens after them, which it does not
            # see.
            slots = (~keep).sort(dim=1, stable=True).indices[:, :kept]
            change.apply(layer.tokens, pages[layer.group], size)
            move_slots(layer.tokens.slot_tensors(), pages[layer.group], slots, size)
            moved.append(mass.gather(1, slots))
            visible.append(keep.gather(1, slots))
        self._masses[sequence] = self._counted(sequence), moved
        if self.uneven:
            self._visible[sequence] = visible

    def visible_slots(self, plan: StepPlan) -> list[list[Tensor | None]] | None:
        """Return the slots that each head sees, by layer and sequence of a step; None if all heads see all slots."""
        found = [self._visible.get(span.sequence) for span in plan.spans]
        if all(each is None for each in found):
            return None
        return [[None if each is None else each[place] for each in found] for place in self._read]

    def observed_positions(self, span: Span) -> range:
        """Return the positions of `span` whose queries count for eviction and have not been counted yet (an interrupted
        step is repeated).
        """
        prompt, observes = span.sequence.prompt_length, self.policy.observes
        first = max(span.start, self._counted(span.sequence))
        if observes is None:
            return range(first, span.end)
        return range(max(first, prompt - observes), max(first, min(span.end, prompt)) if observes else 0)

    def begin_step(self, plan: StepPlan) -> bool:
        """Return whether a step has queries that count for eviction; a text computed from its start is counted from
        zero.
        """
        for span in plan.spans:
            if span.start == 0:
                self._masses.pop(span.sequence, None)
                self._visible.pop(span.sequence, None)
        return any(self.observed_positions(span) for span in plan.spans)

    @torch.inference_mode()
    def add_mass(self, plan: StepPlan, layers: Iterable[ObservedLayer]) -> None:
        """Add the attention that tokens received from the queries that count, layer by layer."""
        looked = [layer.pop_call() for layer in layers]
        first = 0
        for seq, span in enumerate(plan.spans):
            if votes := self.observed_positions(span):
                rows = slice(first + votes.start - span.start, first + votes.stop - span.start)
                end = votes.stop - span.sequence.num_evicted_tokens
                masses = [mass * self._decay ** len(votes) for mass in self._padded(span.sequence, end)]
                for place, read in zip(self._read, looked, strict=True):
                    masses[place] += read.attention_mass(rows, seq, end, self._decay)
                self._masses[span.sequence] = votes.stop, masses
            first += span.length

    def _choose(
        self, number: int, mass: Tensor, pages: tuple[list[int], ...], kept: int, budget: int
    ) -> tuple[Tensor, SlotChange]:
        """Return a mask of the tokens that each head of layer `number` keeps, and the keys and values that the policy
        changes.
        """
        layer = self._layers[number]
        read = functools.partial(read_slots, layer.tokens, pages[layer.group], mass.shape[1])
        tokens = LayerTokens(number, len(self._layers), mass.clone(), kept, read)
        keep = select_slots(self.policy, tokens, budget)
        merge = getattr(self.policy, "merge", None)
        return keep, SlotChange() if merge is None else SlotChange.between(tokens, keep, merge(tokens, keep))

    def _counted(self, sequence: Sequence) -> int:
        return self._masses.get(sequence, (0, []))[0]

    def _padded(self, sequence: Sequence, held: int) -> list[Tensor]:
        """Return the mass of the first `held` slots of each layer with own keys and values, in float64, padded with
        zeros.
        """
        _, masses = self._masses.get(sequence, (0, []))
        if not masses:
            keys = (layer.tokens.slot_tensors()[0] for layer in self._layers)
            masses = [torch.zeros(each.shape[1], 0, dtype=torch.float64, device=each.device) for each in keys]
        return [torch.nn.functional.pad(mass, (0, held - mass.shape[1])) for mass in masses]


class EvictionObserver:
    """An observer of steps for an evictor: steps with queries that count for eviction are computed over `store` with
    observed layers.
    """

    def __init__(self, store: KVStore, evictor: Evictor):
        self.layers = tuple(ObservedLayer(layer) for layer in store.layers)
        self.store, self.evictor = copy.copy(store), evictor
        self.store.layers = self.layers  # type: ignore[assignment] (the layers observed)

    def begin_step(self, plan: StepPlan) -> bool:
        """Return whether a step must be observed."""
        counts, visible = self.evictor.begin_step(plan), self.evictor.visible_slots(plan)
        if not counts and visible is None:
            return False
        for number, layer in enumerate(self.layers):
            layer.visible = [] if visible is None else visible[number]
        return True

    def end_step(self, plan: StepPlan) -> None:
        """Add the attention mass of an observed step."""
        self.evictor.add_mass(plan, self.layers)


def why_not_evictable(spec: ModelSpec, store: KVStore, policy: AnyPolicy) -> str | None:
    """Return the reason why eviction is not supported, None if it is: after an eviction, a token's slot differs from
    its position.
    """
    merges = hasattr(policy, "merge")
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
                f"is kept by the {shape.format}, which encodes heads together, and each head keeps tokens "
                "of its own; encode each head by itself"
            )
        elif merges and shape.num_value_columns is not None:
            message = "has its values as columns of its keys (latent attention), and the policy merges each by itself"
        elif shape.sliding_window is not None:
            message = (
                f"has a window of {shape.sliding_window}, which bounds it already; evict where every layer sees all"
            )
        elif isinstance(attention, AttentionSpec) and (
            attention.position == "alibi" or attention.mask or attention.score or attention.pages
        ):
            message = "needs distances (ALiBi, or a custom mask, score or choice of pages), which eviction loses"
        else:
            continue
        return f"layer {index} {message}"
    return None


def codes_heads_apart(codec: LoadedCodec, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether a codec encodes heads independently: exchanging the codes of one head between two tokens must
    exchange this head's rows, bit for bit, and change no others. It is tested on random rows, head by head.
    """
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
