"""Inspect a request in progress: attention weights and hidden states, recomputed on demand, and heat maps of them.

Nothing is recorded while the model runs. The cache has keys and values of all layers and positions, so the requested
rows are recomputed, each as one query; pages are read and never written.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_kernels.attention import AttentionParameters, attention_weights
from compiled_kernels.quantized_attention import hadamard_rotate
from workbench.batch import TokenBatch
from workbench.display import STYLE, Displayable, Table
from workbench.errors import WorkbenchError
from workbench.kv_cache.layer import CacheLayer, LayerView
from workbench.kv_cache.pages import NULL_PAGE
from workbench.kv_cache.store import KVStore
from workbench.model.layers import TransformerBlock
from workbench.model.mixer import AttentionMixer
from workbench.model.transformer import Transformer
from workbench.pixels import colorize, data_uri, max_pool, upscale
from workbench.request import Sequence

MAX_MAPS, MAX_COLUMNS, MAX_ROWS = 32, 256, 128
WIDE, HIGH = 192, 96  # approximate width and height in pixels of an enlarged small map
LARGEST, LEAST_HIGH = 24, 10  # maximum pixels per weight, minimum height of a map in pixels


def inspection_table(found: Inspection) -> Table:
    """Return a table of the position with the largest attention weight, by layer and head."""
    rows = []
    for layer, weights in found.weights.items():
        for index, mass in enumerate(weights.numpy()):
            row, position = np.unravel_index(int(mass.argmax()), mass.shape)
            label = f"{mass[row, position]:.2f} from {found.positions[row]} to {position}"
            rows.append((layer, head_index(found, index), label))
    states = ", ".join(f"{layer}: {list(each.shape)}" for layer, each in found.hidden_states.items())
    return Table(
        f"request {found.request_id}: {_rows(found)}", rows, ("layer", "head", "largest weight"),
        f"hidden states before block {states}" if states else "",
    )  # fmt: skip


def inspection_html(found: Inspection) -> str:
    """Return HTML with the first attention maps of all layers, and a note on the maps left out."""
    maps = [(layer, index) for layer, weights in found.weights.items() for index in range(len(weights))]
    words = inspection_table(found)
    notes = [words.note] if words.note else []
    if len(maps) > MAX_MAPS:
        notes.append(f"{MAX_MAPS} of {len(maps)} heads are drawn; ask for others with layers= and heads=")
    if maps:
        notes.append("dark: 0, yellow: the largest weight of the map; down: rows, across: positions from 0")
    drawn = "".join(_figure(found, layer, index) for layer, index in maps[:MAX_MAPS])
    title = f'<div class="title">{escape(words.title)}</div>'
    label = "".join(f'<div class="note">{escape(note)}</div>' for note in notes)
    return f'<div class="wb-shown">{STYLE}{title}{drawn}{label}</div>'


def head_index(found: Inspection, index: int) -> int:
    return index if found.heads is None else found.heads[index]


def _figure(found: Inspection, layer: int, index: int) -> str:
    whole = found.weights[layer][index].numpy()
    mass, step = max_pool(whole[-MAX_ROWS:], MAX_COLUMNS)
    across = max(1, min(LARGEST, WIDE // mass.shape[1]))
    down = max(1, min(LARGEST, max(HIGH // len(mass), -(-LEAST_HIGH // len(mass)))))
    name = f"layer {layer} head {head_index(found, index)}"
    row, position = np.unravel_index(int(whole.argmax()), whole.shape)
    largest = f"{whole[row, position]:.2f} at {position}"
    label = f"{name}: {_rows(found)}; largest weight {largest}, from {found.positions[row]}"
    pixel = f"; a pixel is the largest of {step} positions" if step > 1 else ""
    picture = data_uri(upscale(colorize(mass, 0.0, float(mass.max())), down, across))
    return (
        f'<figure><img src="{picture}" alt="{escape(label)}" title="{escape(label + pixel)}">'
        f"<figcaption>{name}: {largest}</figcaption></figure>"
    )


def _rows(found: Inspection) -> str:
    few = ", ".join(map(str, found.positions[:8])) + (", ..." if len(found.positions) > 8 else "")
    one = len(found.positions) == 1
    return f"{'row' if one else 'rows'} {few}, of {len(found.token_ids)} positions"


@dataclass(frozen=True)
class Inspection(Displayable):
    """The inspected weights and states of one request; a notebook shows the weights as pictures.

    `weights[layer]` is [head, row, context] in float32: zero for masked positions; a row's sum is below one if there
    are sink logits. `hidden_states[layer]` is [row, hidden], the input of block `layer`; the key `num_layers` has the
    output of the last block.
    """

    request_id: str
    positions: tuple[int, ...]  # positions in the text
    token_ids: tuple[int, ...]  # token ids of all positions up to the last row
    weights: dict[int, Tensor] = field(default_factory=dict, repr=False)
    hidden_states: dict[int, Tensor] = field(default_factory=dict, repr=False)
    heads: tuple[int, ...] | None = None  # heads in `weights`; None: all

    def _display_table(self) -> Table:
        return inspection_table(self)

    def _repr_html_(self) -> str:
        return inspection_html(self)


@torch.inference_mode()
def inspect(
    model: Transformer,
    store: KVStore,
    sequence: Sequence,
    positions: abc.Sequence[int],
    layers: abc.Sequence[int] | None = None,
    heads: abc.Sequence[int] | None = None,
    hidden_states: abc.Sequence[int] | None = None,
) -> Inspection:
    """Recompute attention weights and hidden states of `sequence`.

    Args:
        model: the model.
        store: its KV cache.
        sequence: the sequence; its pages are read.
        positions: positions in the text; negative ones count from the last computed token.
        layers: layers for which weights are returned; default all.
        heads: heads for which weights are returned; default all.
        hidden_states: blocks for which the input hidden states are returned; default none.

    Raises:
        WorkbenchError: for positions not computed yet, unknown layers or heads, and rows with freed pages of a sliding
            window.
    """
    count = len(model.blocks)
    refuse_recurrent_layers(model)
    if sequence.num_evicted_tokens:
        message = f"{sequence.num_evicted_tokens} of its tokens were evicted, in each layer others"
        raise WorkbenchError(f"request {sequence.request_id}: cannot be inspected any more; {message}")
    places = tuple(
        _index(row, sequence.num_computed_tokens, f"row {row}: {sequence.num_computed_tokens} tokens are computed")
        for row in positions
    )
    if not places:
        raise WorkbenchError(f"request {sequence.request_id}: no rows to inspect")
    weighed = {
        _index(n, count, f"layer {n}: the model has {count}") for n in (range(count) if layers is None else layers)
    }
    wanted = {_index(n, count + 1, f"hidden state {n}: there are {count + 1}") for n in hidden_states or ()}
    for row in places:
        _check_held(store, sequence, row)
    batch = _batch(store, sequence, places, model.device)
    looked: dict[int, _RecordingLayer] = {}
    states: dict[int, Tensor] = {}
    numbers = {block: number for number, block in enumerate(model.blocks)}

    def run(block: TransformerBlock, x: Tensor, cos: Any, sin: Any, batch: TokenBatch, cache: CacheLayer) -> Tensor:
        number = numbers[block]
        if number in wanted:
            states[number] = x.clone()
        q, _, _ = block.before_attention(x, cos, sin)
        look = _RecordingLayer(cache) if number in weighed else cache
        assert isinstance(block.attention, AttentionMixer)  # `refuse_recurrent_layers`
        mixed = block.attention.attend(q, batch, look)
        if isinstance(look, _RecordingLayer):
            looked[number] = look
        return block.after_attention(x, mixed)

    last = model.hidden_states(batch, store, run)
    if count in wanted:
        states[count] = last
    found = {number: _chosen(look.weights(), heads) for number, look in sorted(looked.items())}
    known = tuple(sequence.token_ids[: max(places) + 1])
    chosen = None if heads is None else tuple(heads)
    return Inspection(sequence.request_id, places, known, found, dict(sorted(states.items())), chosen)


class _RecordingLayer(LayerView):
    """A layer's cache that records the arguments of its attention."""

    def __init__(self, source: CacheLayer):
        super().__init__(source)
        self.call: tuple[Tensor, TokenBatch, AttentionParameters] | None = None

    def attend(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters, backend: Any) -> Tensor:
        self.call = q, batch, parameters
        return super().attend(q, batch, parameters, backend)

    def weights(self) -> Tensor:
        """Return attention weights [head, row, context], computed by the reference. A key stored both quantized and in
        full precision is read once.
        """
        if self.call is None:
            raise WorkbenchError(
                "a custom attention module does not read its cache by `attend`: it has no weights to show"
            )
        q, batch, parameters = self.call
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        if self.source.rotates:
            q = hadamard_rotate(q)
        lengths = batch.context_lengths.tolist()
        out = torch.zeros(q.shape[1], len(q), max(lengths), device=q.device, dtype=q.dtype)
        pages = self.read(q, batch, parameters)
        for row, length in enumerate(lengths):
            context = pages.gather(row, length, slice(row, row + 1), q.dtype)
            found = attention_weights(q[row : row + 1], context, parameters)
            out[:, row].index_add_(1, context.positions, found.flatten(0, 2))
        return out.float()


def _batch(store: KVStore, sequence: Sequence, rows: abc.Sequence[int], device: torch.device) -> TokenBatch:
    """Build a batch in which each row is a separate span over the context that it had when it was computed."""
    positions = torch.tensor(rows, device=device)
    nowhere = torch.full_like(positions, NULL_PAGE)
    widest = max(2, *(len(pages) for pages in sequence.pages))
    tables = [[*pages, *[NULL_PAGE] * (widest - len(pages))] for pages in sequence.pages]
    return TokenBatch(
        token_ids=torch.tensor([sequence.token_ids[row] for row in rows], device=device),
        positions=positions,
        span_starts=torch.arange(len(rows) + 1, dtype=torch.int32, device=device),
        context_lengths=(positions + 1).to(torch.int32),
        page_tables=tuple(torch.tensor([table] * len(rows), dtype=torch.int32, device=device) for table in tables),
        slot_mapping=(nowhere,) * len(tables),
        logits_indices=positions[:0],
        decode_only=True,
        length_limits=torch.full_like(positions, sequence.length_limit),
    )


def refuse_recurrent_layers(model: Transformer) -> None:
    """Raise WorkbenchError if a layer has a recurrent state: its values after earlier tokens are not stored."""
    for index, kind in enumerate(model.spec.layers):
        if kind.recurrent is not None:
            raise WorkbenchError(f"layer {index} has a recurrent state: attention cannot be inspected in such a model")


def _check_held(store: KVStore, sequence: Sequence, row: int) -> None:
    """Raise WorkbenchError if a row reads a freed page."""
    for table, pages in zip(store.groups, sequence.pages, strict=True):
        first, others = table.pages_needed(row, row + 1, store.page_size)
        if any(place >= len(pages) or pages[place] == NULL_PAGE for place in (*first, *others)):
            raise WorkbenchError(
                f"request {sequence.request_id}: row {row} cannot be inspected any more; tokens that it saw have "
                f"left the window of {table.sliding_window} tokens"
            )


def _chosen(weights: Tensor, heads: abc.Sequence[int] | None) -> Tensor:
    if heads is None:
        return weights
    return weights[[_index(head, len(weights), f"head {head}: there are {len(weights)}") for head in heads]]


def _index(number: int, count: int, wrong: str) -> int:
    place = number + count if number < 0 else number
    if not 0 <= place < count:
        raise WorkbenchError(wrong)
    return place
