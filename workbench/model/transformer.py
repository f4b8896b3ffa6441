"""The decoder: embedding, blocks, norm, head."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Lane
from workbench.batch import TokenBatch
from workbench.cache.pages import pages_for
from workbench.cache.store import CacheShape, DenseLayer, KVStore
from workbench.errors import WorkbenchError
from workbench.model.layers import Block, Linear, Norm
from workbench.model.quantized import WeightFormat, dequantize, quantize
from workbench.model.rotary import RotaryTable
from workbench.model.spec import ModelSpec

DENSE = WeightFormat()
RunBlock = Callable[[Block, Tensor, Tensor, Tensor, TokenBatch, DenseLayer], Tensor]


def run_block(block: Block, x: Tensor, cos: Tensor, sin: Tensor, batch: TokenBatch, cache: DenseLayer) -> Tensor:
    return block(x, cos, sin, batch, cache)


class Transformer(nn.Module):
    """A model of `spec` whose operators run on `lane`. Weights come from a state (see `weights.py`), stored as
    `format` says."""

    def __init__(self, spec: ModelSpec, lane: Lane = Lane.EAGER, format: WeightFormat = DENSE):
        super().__init__()
        self.spec = spec
        self.lane = lane
        self.format = format
        self.blocks = nn.ModuleList(Block(kind, spec.width, spec.norm_eps, lane, format) for kind in spec.layers)
        self.norm = Norm(spec.width, spec.norm_eps, lane)
        # A tied model has one matrix: the embedding where it is dense, the head where it is quantized.
        self.embedding = nn.Embedding(spec.vocab, spec.width) if self._plain_embedding else None
        stored = lane, format.head, format.group
        self.head = None if self._shared_embedding else Linear(spec.width, spec.vocab, False, *stored)
        # Layers with heads of equal width share one table of angles.
        dims = sorted({kind.attention.dim for kind in spec.layers})
        self.rotary = nn.ModuleDict({str(dim): RotaryTable(spec.rotary, dim) for dim in dims})

    @classmethod
    def from_state(
        cls, spec: ModelSpec, state: dict[str, Tensor], lane: Lane = Lane.EAGER, format: WeightFormat = DENSE
    ) -> Transformer:
        """The model of a dense `state`, which is emptied where `format` stores it otherwise."""
        if format != DENSE:
            state = quantize(state, spec, format)
        with torch.device("meta"):
            model = cls(spec, lane, format)
        model.load_state_dict(state, strict=True, assign=True)
        for dim in model.rotary:  # not part of any state: computed here, in float64
            model.rotary[dim] = RotaryTable(spec.rotary, int(dim))
        return model.requires_grad_(False).to(model.device).eval()

    def run_on(self, lane: Lane) -> None:
        """From now on every part's operators run on `lane`."""
        for part in self.modules():
            if "lane" in vars(part):
                vars(part)["lane"] = lane

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def _plain_embedding(self) -> bool:
        return not (self.spec.tied and self.format.head != "dense")

    @property
    def _shared_embedding(self) -> bool:
        return self.spec.tied and self.format.head == "dense"

    @property
    def head_tensors(self) -> tuple[Tensor, ...]:
        """The head's matrix, and its scales where it has such."""
        return (cast(nn.Embedding, self.embedding).weight,) if self.head is None else self.head.tensors

    @property
    def weight_bytes(self) -> int:
        """What one decode step reads: every parameter once, the embedding only where it is the head too."""
        unread = 0 if self.embedding is None or self.head is None else self.embedding.weight.nbytes
        return sum(parameter.nbytes for parameter in self.parameters()) - unread

    @property
    def head_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.head_tensors)

    @property
    def value_bytes(self) -> tuple[float, float]:
        """Bytes that a value of a matrix takes, scales included: in the blocks, and in the head."""
        linears = [part for block in self.blocks for part in block.modules() if isinstance(part, Linear)]
        stored = sum(
            linear.weight.nbytes + (0 if linear.scales is None else linear.scales.nbytes) for linear in linears
        )
        values = sum(linear.width * linear.weight.shape[0] for linear in linears)
        return stored / values, self.head_bytes / (self.spec.vocab * self.spec.width)

    def embed(self, ids: Tensor) -> Tensor:
        """[token] -> [token, width]."""
        return cast(Linear, self.head).rows(ids, self.dtype) if self.embedding is None else self.embedding(ids)

    def dense_state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every parameter as numbers of `dtype`, under its name; a quantized one as it is multiplied with."""
        stored = dict(self.named_parameters())
        dense = {
            name: dequantize(tensor, stored.get(name.removesuffix("weight") + "scales"), dtype)
            for name, tensor in stored.items()
            if not name.endswith("scales")
        }
        return dense if self.embedding is not None else {**dense, "embedding.weight": dense["head.weight"]}

    @torch.inference_mode()
    def forward(self, batch: TokenBatch, store: KVStore, run: RunBlock = run_block) -> Tensor:
        """Logits of the sampled rows, float32: [sample, vocab]."""
        return self.logits_of(self.hidden(batch, store, run)[batch.sample_rows])

    def hidden(self, batch: TokenBatch, store: KVStore, run: RunBlock = run_block) -> Tensor:
        """What the last block leaves, for every row: [token, width]."""
        angles = {dim: table(batch.positions) for dim, table in self.rotary.items()}
        exact = torch.promote_types(self.dtype, torch.float32)
        x = self.embed(batch.ids)
        for block, kind, cache in zip(self.blocks, self.spec.layers, store.layers, strict=True):
            cos, sin = (part.to(exact) for part in angles[str(kind.attention.dim)])
            x = run(cast(Block, block), x, cos, sin, batch, cache)
        return x

    def logits_of(self, x: Tensor) -> Tensor:
        """[sample, width] -> [sample, vocab], float32 (float64 stays)."""
        x = self.norm(x)
        if self.head is None:
            logits = compiled_kernels.linear(x, self.head_tensors[0], None, self.lane)
        else:
            logits = self.head(x)
        return logits if logits.dtype == torch.float64 else logits.float()

    def cache_shapes(self) -> tuple[CacheShape, ...]:
        tables = {layer: table for table, group in enumerate(self.spec.layer_groups) for layer in group}
        return tuple(
            CacheShape(kind.attention.groups, kind.attention.dim, tables[index])
            for index, kind in enumerate(self.spec.layers)
        )

    def logits(self, token_ids: Iterable[int] | Tensor) -> Tensor:
        """Logits of every position of one text: [token, vocab], float32. Touches no runner's cache."""
        ids = self.checked_ids(token_ids)
        tables = len(self.spec.layer_groups)
        size = 64
        pages = pages_for(len(ids), size)
        store = KVStore(self.cache_shapes(), (pages,) * tables, size, self.dtype, str(self.device))
        rows = torch.arange(len(ids), device=self.device)
        batch = TokenBatch(
            ids=ids,
            positions=rows,
            span_starts=torch.tensor([0, len(ids)], device=self.device),
            context_lengths=torch.tensor([len(ids)], device=self.device),
            page_tables=(torch.arange(1, pages + 1, device=self.device)[None],) * tables,
            slots=(rows + size,) * tables,
            sample_rows=rows,
            decode_only=False,
        )
        return self(batch, store)

    def checked_ids(self, token_ids: Iterable[int] | Tensor) -> Tensor:
        """Ids as a tensor [token], refused where empty, too long or not in the vocabulary."""
        ids = torch.as_tensor(token_ids if isinstance(token_ids, Tensor) else list(token_ids))
        if ids.ndim != 1 or len(ids) == 0 or ids.is_floating_point():
            raise WorkbenchError("token ids must be one non-empty row of integers")
        if int(ids.min()) < 0 or int(ids.max()) >= self.spec.vocab:
            given = f"{int(ids.min())}..{int(ids.max())}"
            raise WorkbenchError(f"token ids must lie in 0..{self.spec.vocab - 1}; {given} given")
        if len(ids) > self.spec.context:
            raise WorkbenchError(f"{len(ids)} tokens exceed the model's context of {self.spec.context}")
        return ids.long().to(self.device)
