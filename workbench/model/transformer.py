"""Run the decoder: embedding, blocks, norm, head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.blocked import from_panels, in_panels
from compiled_kernels.threads import in_threads
from workbench.batch import TokenBatch
from workbench.errors import WorkbenchError
from workbench.kv_cache.format import CacheFormat, KVCacheSpec
from workbench.kv_cache.layer import CacheLayer
from workbench.kv_cache.pages import NULL_PAGE, build_cache_groups, pages_for
from workbench.kv_cache.store import KVStore
from workbench.model.altup import AltUpBlock, Streams
from workbench.model.attention_spec import AttentionSpec
from workbench.model.expert_use import ExpertUse
from workbench.model.feedforward import STACKS, MixtureOfExperts
from workbench.model.layers import (
    STORED_PARAMETERS,
    SumOverRanks,
    TransformerBlock,
    build_custom_attention,
    one_rank,
)
from workbench.model.linear import Linear, StackedLinear, build_norm, stored_as
from workbench.model.memory import cache_shapes
from workbench.model.mixer import Angles
from workbench.model.model_parameters import parameter_shapes
from workbench.model.quantized import BESIDE, WeightFormat, part_name, quantize
from workbench.model.rotary import RotaryKey, RotaryTable, build_rotary_table, rotaries_of_model, rotary_of_layer
from workbench.model.spec import ModelSpec

if TYPE_CHECKING:
    Item = TypeVar("Item", bound=nn.Module)

    class ModulesOf(nn.ModuleList, Generic[Item]):
        def __iter__(self) -> Iterator[Item]: ...
        def __getitem__(self, index: int) -> Item: ...
else:
    ModulesOf = nn.ModuleList  # its items are untyped

DENSE = WeightFormat()
RunBlock = Callable[[TransformerBlock, Tensor, Angles, Angles, TokenBatch, CacheLayer], Tensor]


def run_block(
    block: TransformerBlock, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: CacheLayer
) -> Tensor:
    return block(x, cos, sin, batch, cache)


class Transformer(nn.Module):
    """A decoder of the architecture `spec` whose operators run on one backend. Weights come from a state dict (see
    `hf/weights.py`) in `format`.
    """

    blocks: ModulesOf[TransformerBlock]
    rotary: ModulesOf[RotaryTable]
    _empty: Tensor

    def __init__(
        self,
        spec: ModelSpec,
        backend: Backend = Backend.EAGER,
        format: WeightFormat = DENSE,
        sum_over_ranks: SumOverRanks = one_rank,
    ):
        super().__init__()
        self.spec = spec
        self.backend = backend
        self.format = format
        self.expert_use: ExpertUse | None = None  # expert counts of mixtures, if recorded
        shared = spec.hidden_size, backend, format, spec.norm, spec.residual_scale
        altup = spec.altup
        self.blocks = ModulesOf(
            TransformerBlock(kind, *shared, sum_over_ranks) if altup is None else AltUpBlock(altup, kind, *shared[:-1])
            for kind in spec.layers
        )
        self.streams = None if altup is None else Streams(spec, altup, backend, format)
        for name, matrix in format.own:
            parent, _, child = name.removesuffix(".weight").rpartition(".")
            module = self.get_submodule(parent)
            if isinstance(module, MixtureOfExperts) and child in STACKS:
                module.store_as(child, matrix[0][1])
            else:
                setattr(module, child, stored_as(getattr(module, child), matrix))
        self.norm = build_norm(spec.hidden_size, spec.norm, backend)
        self.embedding_norm = build_norm(spec.hidden_size, spec.norm, backend) if spec.embedding_norm else None
        first = spec.learned_positions
        rows = 0 if first is None else spec.max_position_embeddings + first
        self.positions = None if first is None else _unfilled(rows, spec.hidden_size)
        # A tied model has one matrix: the embedding if dense, the head if quantized.
        tied, sizes = spec.tie_word_embeddings, (spec.hidden_size, spec.vocab_size)
        only_head = tied and not format.head.is_dense
        self.embedding = None if only_head else Linear(*sizes, False, backend, format.embedding)
        stored = backend, format.head, format.activations
        self.head = None if tied and not only_head else Linear(*sizes, spec.head_bias, *stored)
        self.register_buffer("_empty", torch.empty(0), persistent=False)  # a tensor with the model's type and device
        rotaries = rotaries_of_model(spec)
        self.rotary = ModulesOf(map(build_rotary_table, rotaries))
        places: dict[RotaryKey | None, int | None] = {rotary: place for place, rotary in enumerate(rotaries)}
        places[None] = None
        self.rotary_of_block = tuple(
            places[rotary_of_layer(spec, kind.attention)] for kind in spec.layers
        )  # index in `rotary` for each layer

    @classmethod
    def from_state(
        cls, spec: ModelSpec, state: dict[str, Tensor], backend: Backend = Backend.EAGER, format: WeightFormat = DENSE,
        sum_over_ranks: SumOverRanks = one_rank, dtype: torch.dtype | None = None,
    ) -> Self:  # fmt: skip
        """Build the model from a dense `state`, which is emptied if `format` is not dense; the default `dtype` is that
        of the last norm.
        """
        if format != DENSE:
            state = quantize(state, spec, format)
        with torch.device("meta"):
            model = cls(spec, backend, format, sum_over_ranks)
        known = state["norm.weight"] if "norm.weight" in state else next(iter(state.values()))
        model._empty = known.new_empty(0, dtype=dtype)
        own = _own_modules(model, model.dtype)
        missing, extra = model.load_state_dict(state, strict=False, assign=True)
        missing = [name for name in missing if name not in own]
        if missing or extra:
            raise WorkbenchError(f"{spec.name}: a state of another model: missing {missing[:3]}, extra {extra[:3]}")
        # Not part of a state dict: computed here in float64.
        model.rotary = ModulesOf(map(build_rotary_table, rotaries_of_model(spec)))
        return model.requires_grad_(False).to(model.device).eval()

    def set_backend(self, backend: Backend) -> None:
        """Switch every module to another backend."""
        for part in self.modules():
            if "backend" in vars(part):
                vars(part)["backend"] = backend

    def use_panels(self, panels: bool = True) -> None:
        """Convert the matrices of the blocks to panels, blocks of 32 output columns that the backend mlir reads in
        decode and prefill; with `panels` false, convert them back to rows.

        A dense head (multiplied with few rows) and matrices of unsuitable size stay row by row. Conversion is matrix by
        matrix, so at most one matrix exists twice.
        """
        for part in self.blocks.modules():
            if isinstance(part, Linear | MixtureOfExperts):
                part.use_panels(panels)

    def use_code_panels(self, panels: bool = True, in_place: bool = False) -> bool:
        """Convert the matrices that the backend mlir can read only in panels: experts of mixtures and all quantized
        products, the head included. Return whether the blocks have any. `in_place` overwrites the rows of quantized
        matrices, which no other code may read then.
        """
        stacked = [part for whole in self.modules() if isinstance(whole, StackedLinear) for part in whole.parts]
        coded = [part for part in self.modules() if isinstance(part, Linear) and not part.format.is_dense] + stacked
        coded = [part for part in coded if part is not self.embedding]  # an embedding is looked up row by row
        mixtures = [part for part in self.blocks.modules() if isinstance(part, MixtureOfExperts)]
        for part in mixtures:
            part.use_panels(panels)
        if any(in_panels(part.weight) != panels for part in coded):
            in_threads(lambda part: part.use_panels(panels, in_place), dict.fromkeys(coded))  # one thread per matrix
        return bool(mixtures) or any(part is not self.head for part in coded)

    def record_experts(self, max_rows: int | None) -> None:
        """Count in `expert_use` the rows of each expert, for steps of up to `max_rows` rows; None stops counting."""
        if self.expert_use is not None:
            self.expert_use.stop()
        self.expert_use = None if max_rows is None else ExpertUse(self.blocks, max_rows)

    def count_experts(self, rows: int, chosen: Mapping[int, Tensor] | None = None) -> None:
        """Add the experts of the first `rows` rows of the last forward pass to `expert_use`, if they are recorded."""
        if self.expert_use is not None:
            self.expert_use.count(rows, chosen)

    @property
    def dtype(self) -> torch.dtype:
        return self._empty.dtype

    @property
    def device(self) -> torch.device:
        return self._empty.device

    @property
    def head_tensors(self) -> tuple[Tensor, ...]:
        """Return the head's matrix, and its scales if quantized."""
        if self.head is not None:
            return self.head.tensors
        assert self.embedding is not None  # the tied matrix
        return (self.embedding.weight,)

    @property
    def weight_bytes(self) -> int:
        """Return the number of weight bytes that one decode step reads: every parameter once, the embedding only if it
        is tied, and of a mixture only the experts of one token.
        """
        unread = 0 if self.embedding is None or self.head is None else self.embedding.matrix_bytes
        unread += 0 if self.streams is None else self.streams.input_embedding.weight.nbytes
        unread += sum(part.unread_bytes for part in self.modules() if isinstance(part, MixtureOfExperts))
        return sum(parameter.nbytes for parameter in self.parameters()) - unread

    @property
    def head_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.head_tensors)

    @property
    def bytes_per_weight(self) -> tuple[float, float]:
        """Return the stored bytes per value of a matrix, scales included: in the blocks, and in the head."""
        linears = [part for block in self.blocks for part in block.modules() if isinstance(part, Linear)]
        shapes = parameter_shapes(self.spec)
        there = dict(self.named_parameters())
        stacks = {name: shape for name, shape in shapes.items() if len(shape) == 3 and name in there}
        stored = sum(linear.matrix_bytes for linear in linears)
        parts = (f"{name}{end}" for name in stacks for end in ("", *(f"_{part}" for part in BESIDE)))
        stored += sum(there[each].nbytes for each in parts if each in there)
        values = sum(linear.in_features * linear.out_features for linear in linears)
        values += sum(map(math.prod, stacks.values()))
        return stored / values, self.head_bytes / (self.spec.vocab_size * self.spec.hidden_size)

    def embed(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Embed token ids [token] at `positions` [token], which matter for learned positions: [token, hidden], or the
        rows of `altup`.
        """
        rows = self.lookup(ids)
        scale = self.spec.embedding_scale
        if scale != 1:
            rows = rows * rows.new_full((), scale)  # rounded to the model's type, as in training
        if self.positions is not None and positions is not None:
            rows = rows + self.positions(positions + (self.spec.learned_positions or 0))
        rows = rows if self.embedding_norm is None else self.embedding_norm(rows)
        return rows if self.streams is None else self.streams.rows(rows, ids)

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the stored embeddings of token ids [token]: [token, hidden]."""
        table = self.head if self.embedding is None else self.embedding
        assert table is not None
        return table.lookup_rows(ids, self.dtype)

    def dense_state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return every parameter in `dtype` by name; quantized parameters are dequantized."""
        stored = {name: from_panels(tensor) for name, tensor in self.named_parameters()}
        products = {
            f"{name}.weight": part for name, part in self.named_modules() if isinstance(part, Linear | StackedLinear)
        }
        inner = {part_name(name, i, rows) for name, rows in self.format.own for i in range(len(rows)) if len(rows) > 1}
        dense = {name: part.lookup_rows(slice(None), dtype) for name, part in products.items() if name not in inner}
        mixtures = {name: part for name, part in self.named_modules() if isinstance(part, MixtureOfExperts)}
        dense |= {
            f"{name}.{stack}": torch.stack([part.matrix(stack, each).to(dtype) for each in range(part.sizes[stack][0])])
            for name, part in mixtures.items()
            for stack in STACKS
        }
        dense |= {
            name: tensor.to(dtype)
            for name, tensor in stored.items()
            if name not in products and name not in dense and not name.endswith(BESIDE)
        }
        return dense if self.embedding is not None else {**dense, "embedding.weight": dense["head.weight"]}

    @torch.inference_mode()
    def forward(self, batch: TokenBatch, store: KVStore, run: RunBlock = run_block) -> Tensor:
        """Run the model and return the logits of the rows that are sampled, float32 [sample, vocab].

        Args:
            batch: the packed tokens of a step.
            store: the cache, which is written and read.
            run: calls a block (may call a compiled block instead).
        """
        rows = self.hidden_states(batch, store, run)[batch.logits_indices]
        if not len(rows):  # part of a prefill without samples: operators need not support empty inputs
            return rows.new_empty((0, self.spec.vocab_size), dtype=torch.promote_types(self.dtype, torch.float32))
        return self.compute_logits(rows)

    def hidden_states(self, batch: TokenBatch, store: KVStore, run: RunBlock = run_block) -> Tensor:
        """Return the hidden states of every row after the last block: [token, hidden], or the rows of `altup`."""
        exact = torch.promote_types(self.dtype, torch.float32)
        found = (table(batch.positions, batch.length_limits) for table in self.rotary)
        angles = [(cos.to(exact), sin.to(exact)) for cos, sin in found]
        x = self.embed(batch.token_ids, batch.positions)
        for layer, (block, rotary, cache) in enumerate(
            zip(self.blocks, self.rotary_of_block, store.layers, strict=True)
        ):
            cos, sin = (None, None) if rotary is None else angles[rotary]
            x = run(block, x, cos, sin, batch, cache)
            if store.on_layer is not None:
                store.on_layer(layer)
        return x

    def compute_logits(self, x: Tensor) -> Tensor:
        """Compute the logits of hidden states: [sample, hidden] -> float32 [sample, vocab] (float64 stays)."""
        x = self.norm(x if self.streams is None else self.streams.hidden(x))
        if self.head is None:
            logits = compiled_kernels.linear(x, self.head_tensors[0], None, self.backend)
        else:
            logits = self.head(x)
        return self.cap_logits(logits if logits.dtype == torch.float64 else logits.float())

    def cap_logits(self, logits: Tensor) -> Tensor:
        logits = logits if self.spec.logit_scale == 1 else logits * self.spec.logit_scale
        cap = self.spec.final_logit_softcapping
        return cap * torch.tanh(logits / cap) if cap else logits

    def cache_shapes(self, format: CacheFormat | None = None) -> tuple[KVCacheSpec, ...]:
        """Return the cache shape of each layer; dense if no `format` is given."""
        return cache_shapes(self.spec, format)

    def logits(self, token_ids: Iterable[int] | Tensor) -> Tensor:
        """Return the logits at every position of one text: float32 [token, vocab]. No runner's cache is used."""
        return self(*self.whole_text(token_ids))

    def whole_text(
        self, token_ids: Iterable[int] | Tensor, dtype: torch.dtype | None = None
    ) -> tuple[TokenBatch, KVStore]:
        """Return one text as the batch of one step, and an empty dense store of `dtype` (default: the model's) for it.
        Page 1 + i has the positions from i * page_size on.
        """
        ids = self.validate_token_ids(token_ids)
        shapes = self.cache_shapes()
        size = next((shape.summaries.page_size for shape in shapes if shape.summaries is not None), 64)
        groups = build_cache_groups(shape.cache_groups for shape in shapes)
        pages = pages_for(len(ids), size)
        store = KVStore(shapes, (pages,) * len(groups), size, dtype or self.dtype, str(self.device))
        rows = torch.arange(len(ids), device=self.device)
        nowhere = torch.full_like(rows, NULL_PAGE)  # no state is kept
        batch = TokenBatch(
            token_ids=ids,
            positions=rows,
            span_starts=torch.tensor([0, len(ids)], device=self.device),
            context_lengths=torch.tensor([len(ids)], device=self.device),
            page_tables=(torch.arange(1, pages + 1, device=self.device)[None],) * len(groups),
            slot_mapping=tuple(nowhere if group.is_recurrent else rows + size for group in groups),
            logits_indices=rows,
            decode_only=False,
            length_limits=torch.full_like(rows, len(ids)),
        )
        return batch, store

    def validate_token_ids(self, token_ids: Iterable[int] | Tensor) -> Tensor:
        """Return token ids as a tensor [token]. Raises WorkbenchError if they are empty, too many or outside of the
        vocabulary.
        """
        given = token_ids if isinstance(token_ids, Tensor) else list(token_ids)
        try:
            ids = torch.as_tensor(given)
        except (ValueError, OverflowError) as error:  # integers of more than 64 bits
            raise WorkbenchError(f"token ids must lie in 0..{self.spec.vocab_size - 1} ({error})") from None
        if ids.ndim != 1 or len(ids) == 0 or ids.is_floating_point():
            raise WorkbenchError("token ids must be one non-empty row of integers")
        if int(ids.min()) < 0 or int(ids.max()) >= self.spec.vocab_size:
            ends = f"{int(ids.min())}..{int(ids.max())}"
            raise WorkbenchError(f"token ids must lie in 0..{self.spec.vocab_size - 1}; {ends} given")
        if len(ids) > self.spec.max_position_embeddings:
            raise WorkbenchError(f"{len(ids)} tokens exceed the model's context of {self.spec.max_position_embeddings}")
        return ids.long().to(self.device)


def _unfilled(vocab: int, width: int) -> nn.Embedding:
    """Create an embedding without initializing its weights, which come from a state. (Random initialization on the meta
    device would import torch's compiler, which takes longer than the rest of loading a small model.)
    """
    return nn.Embedding(vocab, width, _weight=torch.empty(vocab, width))


def _own_modules(model: Transformer, dtype: torch.dtype) -> set[str]:
    """Build custom attention modules in memory and return the names of parameters that are not in the state: they keep
    their initial values, under a fixed seed.
    """
    names = set()
    for index, block in enumerate(model.blocks):
        spec, attention = model.spec, model.spec.layers[index].attention
        if isinstance(attention, AttentionSpec) and attention.module is not None:
            built = attention, spec.hidden_size, model.backend, model.format, spec.norm, dtype
            block.attention = build_custom_attention(*built)
            own = (name for name, _ in block.attention.named_parameters() if not name.startswith(STORED_PARAMETERS))
            names |= {f"blocks.{index}.attention.{name}" for name in own}
    return names
