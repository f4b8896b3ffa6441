"""The decoder: embedding, blocks, norm, head."""

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
    ModulesOf = nn.ModuleList  # whose items have no type

DENSE = WeightFormat()
RunBlock = Callable[[TransformerBlock, Tensor, Angles, Angles, TokenBatch, CacheLayer], Tensor]


def run_block(
    block: TransformerBlock, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: CacheLayer
) -> Tensor:
    return block(x, cos, sin, batch, cache)


class Transformer(nn.Module):
    """A model of `spec` whose operators run on one backend. Weights come from a state (see `hf/weights.py`), stored as
    `format` says."""

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
        self.expert_use: ExpertUse | None = None  # of mixtures, where it is recorded
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
        # A tied model has one matrix: the embedding where it is dense, the head where it is quantized.
        tied, sizes = spec.tie_word_embeddings, (spec.hidden_size, spec.vocab_size)
        only_head = tied and not format.head.is_dense
        self.embedding = None if only_head else Linear(*sizes, False, backend, format.embedding)
        stored = backend, format.head, format.activations
        self.head = None if tied and not only_head else Linear(*sizes, spec.head_bias, *stored)
        self.register_buffer("_empty", torch.empty(0), persistent=False)  # of the model's type, on its device
        rotaries = rotaries_of_model(spec)
        self.rotary = ModulesOf(map(build_rotary_table, rotaries))
        places: dict[RotaryKey | None, int | None] = {rotary: place for place, rotary in enumerate(rotaries)}
        places[None] = None
        self.rotary_of_block = tuple(
            places[rotary_of_layer(spec, kind.attention)] for kind in spec.layers
        )  # each layer's, in `rotary`

    @classmethod
    def from_state(
        cls, spec: ModelSpec, state: dict[str, Tensor], backend: Backend = Backend.EAGER, format: WeightFormat = DENSE,
        sum_over_ranks: SumOverRanks = one_rank, dtype: torch.dtype | None = None,
    ) -> Self:  # fmt: skip
        """Build the model of a dense `state`, which is emptied where `format` stores it otherwise; `dtype` is that of
        the last norm unless given."""
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
        # Not part of any state: computed here, in float64.
        model.rotary = ModulesOf(map(build_rotary_table, rotaries_of_model(spec)))
        return model.requires_grad_(False).to(model.device).eval()

    def set_backend(self, backend: Backend) -> None:
        """Run every module's operators on another backend from now on."""
        for part in self.modules():
            if "backend" in vars(part):
                vars(part)["backend"] = backend

    def use_panels(self, panels: bool = True) -> None:
        """Keep the matrices of the blocks in panels from now on, which the products of the backend mlir read at decode
        and prefill alike, or row by row again.

        A dense head, which is multiplied with few rows, and matrices that do not fit stay row by row. It works a matrix
        at a time: there is never a second copy of more than one.
        """
        for part in self.blocks.modules():
            if isinstance(part, Linear | MixtureOfExperts):
                part.use_panels(panels)

    def use_code_panels(self, panels: bool = True, in_place: bool = False) -> bool:
        """Do so with what the backend mlir reads only in panels, the experts of mixtures and every product in few bits,
        the head too; return whether there is any in the blocks. `in_place` lays what is in few bits out over its rows,
        which no one else may read."""
        stacked = [part for whole in self.modules() if isinstance(whole, StackedLinear) for part in whole.parts]
        coded = [part for part in self.modules() if isinstance(part, Linear) and not part.format.is_dense] + stacked
        coded = [part for part in coded if part is not self.embedding]  # which is looked up row by row
        mixtures = [part for part in self.blocks.modules() if isinstance(part, MixtureOfExperts)]
        for part in mixtures:
            part.use_panels(panels)
        if any(in_panels(part.weight) != panels for part in coded):
            in_threads(lambda part: part.use_panels(panels, in_place), dict.fromkeys(coded))  # each by one thread
        return bool(mixtures) or any(part is not self.head for part in coded)

    def record_experts(self, max_rows: int | None) -> None:
        """Count which experts up to `max_rows` rows of a step choose, in `expert_use`; None ends that."""
        if self.expert_use is not None:
            self.expert_use.stop()
        self.expert_use = None if max_rows is None else ExpertUse(self.blocks, max_rows)

    def count_experts(self, rows: int, chosen: Mapping[int, Tensor] | None = None) -> None:
        """Add to `expert_use`, where it is recorded, the first `rows` rows of the forward pass that has just run."""
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
        """Return the head's matrix, and its scales where it has such."""
        if self.head is not None:
            return self.head.tensors
        assert self.embedding is not None  # the tied matrix
        return (self.embedding.weight,)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes that one decode step reads: every parameter once, but the embedding only where it is the
        head too, and of a mixture the experts of one token."""
        unread = 0 if self.embedding is None or self.head is None else self.embedding.matrix_bytes
        unread += 0 if self.streams is None else self.streams.input_embedding.weight.nbytes
        unread += sum(part.unread_bytes for part in self.modules() if isinstance(part, MixtureOfExperts))
        return sum(parameter.nbytes for parameter in self.parameters()) - unread

    @property
    def head_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.head_tensors)

    @property
    def bytes_per_weight(self) -> tuple[float, float]:
        """Return the bytes of a value of a matrix, scales included: in the blocks, and in the head."""
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
        """Embed token ids [token] at positions [token], which a table of positions needs: [token, hidden], or
        the rows of `altup`."""
        rows = self.lookup(ids)
        scale = self.spec.embedding_scale
        if scale != 1:
            rows = rows * rows.new_full((), scale)  # rounded to the model's type, as it was trained
        if self.positions is not None and positions is not None:
            rows = rows + self.positions(positions + (self.spec.learned_positions or 0))
        rows = rows if self.embedding_norm is None else self.embedding_norm(rows)
        return rows if self.streams is None else self.streams.rows(rows, ids)

    def lookup(self, ids: Tensor) -> Tensor:
        """Look up token ids [token] in the embedding, as it is stored: [token, hidden]."""
        table = self.head if self.embedding is None else self.embedding
        assert table is not None
        return table.lookup_rows(ids, self.dtype)

    def dense_state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return every parameter as numbers of `dtype`, under its name; a quantized one as it is multiplied with."""
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
        """Run the model: logits of the sampled rows, float32 [sample, vocab].

        Args:
            batch: the packed tokens of a step.
            store: the cache, which is written and read.
            run: how a block is called (a compiled block takes its place).
        """
        rows = self.hidden_states(batch, store, run)[batch.logits_indices]
        if not len(rows):  # part of a prefill: no operator need know what to do with nothing
            return rows.new_empty((0, self.spec.vocab_size), dtype=torch.promote_types(self.dtype, torch.float32))
        return self.compute_logits(rows)

    def hidden_states(self, batch: TokenBatch, store: KVStore, run: RunBlock = run_block) -> Tensor:
        """Return the hidden states after the last block, for every row: [token, hidden], or the rows of `altup`."""
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
        """Compute logits [sample, hidden] -> [sample, vocab], float32 (float64 stays)."""
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
        """Return the cache shape of each layer, dense unless a format says otherwise."""
        return cache_shapes(self.spec, format)

    def logits(self, token_ids: Iterable[int] | Tensor) -> Tensor:
        """Return logits of every position of one text: [token, vocab], float32. Touches no runner's cache."""
        return self(*self.whole_text(token_ids))

    def whole_text(
        self, token_ids: Iterable[int] | Tensor, dtype: torch.dtype | None = None
    ) -> tuple[TokenBatch, KVStore]:
        """Return one text as a step, and an empty store of `dtype` (the model's, unless given) for it, dense. Its page
        1 + i has positions from i * page_size on."""
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
        """Return ids as a tensor [token]. Raises WorkbenchError where they are empty, too many or not in the
        vocabulary."""
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
    """Make an embedding whose weights come from a state. (Filled with random ones, on the meta device, they would
    import torch's compiler: that takes longer than all else in loading a small model.)"""
    return nn.Embedding(vocab, width, _weight=torch.empty(vocab, width))


def _own_modules(model: Transformer, dtype: torch.dtype) -> set[str]:
    """Build custom attention modules in memory and return the names of parameters that no state has: they keep the
    values of their construction, under a fixed seed."""
    names = set()
    for index, block in enumerate(model.blocks):
        spec, attention = model.spec, model.spec.layers[index].attention
        if isinstance(attention, AttentionSpec) and attention.module is not None:
            built = attention, spec.hidden_size, model.backend, model.format, spec.norm, dtype
            block.attention = build_custom_attention(*built)
            own = (name for name, _ in block.attention.named_parameters() if not name.startswith(STORED_PARAMETERS))
            names |= {f"blocks.{index}.attention.{name}" for name in own}
    return names
