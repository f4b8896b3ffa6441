"""Embed texts with a serving model: take the mean of a layer's hidden states over a text's tokens, and normalize it to
unit length.

    text -> token ids -> hidden states of every token after a layer -> mean over tokens -> divided by its norm

Each text is computed alone, without the runner's cache, in chunks between the runner's steps. So its vector does not
depend on other texts, and a busy runner waits for at most one chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.batch import TokenBatch
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import between_steps
from workbench.errors import WorkbenchError
from workbench.kv_cache.pages import build_cache_groups, pages_for
from workbench.kv_cache.store import KVStore
from workbench.model.layers import TransformerBlock
from workbench.model.mixer import Angles
from workbench.model.transformer import RunBlock, Transformer, run_block

TOKENS_PER_CHUNK = 256
PAGE_SIZE = 64


@dataclass(frozen=True)
class TextEmbedding:
    """The embedding of a text (a vector of unit length) and its number of tokens."""

    vector: tuple[float, ...]
    num_tokens: int


def embed_texts(
    runner: Runner, texts: Sequence[str | Sequence[int]], layer: int | None = None, max_tokens: int | None = None
) -> list[TextEmbedding]:
    """Return the embedding of each text; the runner may be busy with requests.

        vectors = embed_texts(runner, ["a text", "another"])

    Args:
        runner: the runner of the model; a text starts with its begin token, as a prompt does.
        texts: texts, or token ids.
        layer: number of layers after which hidden states are taken, from 0; default: all, with the final norm.
        max_tokens: limit on the tokens of all texts together; default: only the model's context limits each text.

    Raises:
        WorkbenchError: before any computation, for an empty text, a text beyond the model's context, too many tokens,
            or an unknown layer.
    """
    rows = texts_to_ids(runner, texts, layer, max_tokens)
    embeddings = []
    for ids in rows:
        mean = TextMean(runner.model, ids, layer)
        while mean.advance(runner) if runner.owner is None else between_steps(runner, mean.advance):
            pass
        embeddings.append(mean.embedding())
    return embeddings


def texts_to_ids(
    runner: Runner, texts: Sequence[str | Sequence[int]], layer: int | None = None, max_tokens: int | None = None
) -> list[tuple[int, ...]]:
    """Return the token ids of each text; arguments and errors are those of `embed_texts`."""
    count = len(runner.model.blocks)
    if layer is not None and not 0 <= layer <= count:
        raise WorkbenchError(f"layer: {layer}, the model has {count} layers; give 0 to {count}")
    rows = [_token_ids(runner, text, f"texts.{number}") for number, text in enumerate(texts)]
    total = sum(map(len, rows))
    if max_tokens is not None and total > max_tokens:
        raise WorkbenchError(f"texts: {total:,} tokens, and {max_tokens:,} may be embedded at once; send fewer")
    return rows


def _token_ids(runner: Runner, text: str | Sequence[int], where: str) -> tuple[int, ...]:
    if isinstance(text, str):
        if runner.tokenizer is None:
            raise WorkbenchError(f"{where}: this model has no tokenizer; give token ids")
        ids = runner.tokenizer.encode(text)
        text = (*runner.tokenizer.bos_token_ids, *ids) if ids else ()
    try:
        return tuple(runner.model.validate_token_ids(text).tolist())
    except WorkbenchError as error:
        raise WorkbenchError(f"{where}: {error}") from None


class TextMean:
    """The running mean of one text's hidden states, computed chunk by chunk; `layer` as in `embed_texts`."""

    def __init__(self, model: Transformer, ids: tuple[int, ...], layer: int | None = None):
        self._num_tokens = self._left = len(ids)
        self._size = _tokens_per_chunk(model, len(ids))
        self._chunks = text_states(model, ids, len(model.blocks) if layer is None else layer)
        self._total = torch.zeros(model.spec.hidden_size, dtype=torch.float64)

    @property
    def next_tokens(self) -> int:
        """Return the number of tokens that `advance` computes next; 0 after the last chunk."""
        return min(self._size, self._left)

    def advance(self, _: Runner) -> bool:
        """Compute one chunk, between two steps of the runner; return False if no chunk was left."""
        states = next(self._chunks, None)
        if states is not None:
            self._left -= self.next_tokens
            self._total.add_(states.double().cpu().sum(0))
        return states is not None

    def embedding(self) -> TextEmbedding:
        """Return the embedding of the text after the last chunk. Raises WorkbenchError if the mean is zero or not
        finite.
        """
        length = float(self._total.norm())
        if not 0 < length < float("inf"):
            words = f"a text of {self._num_tokens} tokens have no direction: their sum is {length}"
            raise WorkbenchError(f"the hidden states of {words}")
        return TextEmbedding(tuple((self._total / length).tolist()), self._num_tokens)


@torch.inference_mode()
def text_states(model: Transformer, ids: Sequence[int], layer: int) -> Iterator[Tensor]:
    """Yield the hidden states of a text after `layer` layers, [token, hidden], a chunk at a time.

    After the last layer, the final norm is applied. A model with recurrent layers gives a single chunk.
    """
    shapes = model.cache_shapes()
    groups, pages = build_cache_groups(shape.cache_groups for shape in shapes), pages_for(len(ids), PAGE_SIZE)
    store = KVStore(shapes, (pages,) * len(groups), PAGE_SIZE, model.dtype, str(model.device))
    size = _tokens_per_chunk(model, len(ids))
    for begin in range(0, len(ids), size):
        batch = _batch(model, ids, range(begin, min(begin + size, len(ids))), store)
        x = model.hidden_states(batch, store, _first_blocks(layer))
        x = x if model.streams is None else model.streams.hidden(x)
        yield model.norm(x) if layer == len(model.blocks) else x


def _tokens_per_chunk(model: Transformer, num_tokens: int) -> int:
    groups = build_cache_groups(shape.cache_groups for shape in model.cache_shapes())
    return num_tokens if any(group.is_recurrent for group in groups) else TOKENS_PER_CHUNK


def _first_blocks(count: int) -> RunBlock:
    """Return a function that runs only the first `count` blocks."""
    number = itertools.count()

    def run(block: TransformerBlock, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: object) -> Tensor:
        return run_block(block, x, cos, sin, batch, cache) if next(number) < count else x  # type: ignore[arg-type] (a layer's cache)

    return run


def _batch(model: Transformer, ids: Sequence[int], rows: range, store: KVStore) -> TokenBatch:
    device, pages = model.device, store.num_pages[0]
    positions = torch.arange(rows.start, rows.stop, device=device)
    nowhere = torch.zeros_like(positions)  # no state is kept
    return TokenBatch(
        token_ids=torch.tensor(ids[rows.start : rows.stop], device=device),
        positions=positions,
        span_starts=torch.tensor([0, len(rows)], dtype=torch.int32, device=device),
        context_lengths=torch.tensor([rows.stop], dtype=torch.int32, device=device),
        page_tables=(torch.arange(1, pages + 1, dtype=torch.int32, device=device)[None],) * len(store.groups),
        slot_mapping=tuple(nowhere if group.is_recurrent else positions + PAGE_SIZE for group in store.groups),
        logits_indices=positions[:0],
        decode_only=False,
        length_limits=torch.full_like(positions, len(ids)),
    )
