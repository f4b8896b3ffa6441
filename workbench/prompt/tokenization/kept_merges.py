"""Cache the merges of a large sentencepiece vocabulary on disk: finding them takes longer than loading the weights.

A file is named by a digest of all inputs of the merges, so it is never out of date. It holds a digest of its contents,
so a truncated or changed file is ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from workbench.files import cache_directory, write_atomically

FOLDER = "merges-1"  # increased when the same vocabulary gives other merges
LARGE = 1 << 16  # vocabularies with at least this many pieces are cached
DIGEST_BYTES = 32

Merges = list[tuple[str, str]]


def keep_merges(
    pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int], find: Callable[[], Merges]
) -> Merges:
    """Return the merges (pairs of pieces) that `find` computes, in its order; read them from disk if an earlier call
    stored them.

    Args:
        pieces: the texts of the vocabulary, by id, each once.
        scores, kinds: score and kind of each piece.
        find: computes the merges from these three and nothing else.
    """
    if len(pieces) < LARGE:
        return find()
    numbers = np.array([[*map(len, pieces)], kinds, scores])
    key = _digest("".join(pieces).encode("utf-8", "surrogatepass") + numbers.tobytes())
    path = cache_directory() / FOLDER / key.hex()
    with suppress(OSError):
        stored = path.read_bytes()
        if (body := stored[DIGEST_BYTES:]) and stored[:DIGEST_BYTES] == _digest(body):
            left, right = np.frombuffer(body, "<i4").reshape(2, -1).tolist()
            return list(zip(map(pieces.__getitem__, left), map(pieces.__getitem__, right), strict=True))
    merges = find()
    ids = {piece: id for id, piece in enumerate(pieces)}
    body = np.array([[ids[pair[side]] for pair in merges] for side in (0, 1)], "<i4").tobytes()
    with suppress(OSError):  # without a cache folder the merges are computed again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(_digest(body) + body))
    return merges


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
