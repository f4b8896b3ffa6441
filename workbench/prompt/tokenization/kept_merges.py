"""Merges of a large sentencepiece vocabulary, kept on disk: to find them takes longer than to load the weights.

A file is named for a digest of all that the merges follow from, so it is never out of date, and holds a digest of its
own, so that one which was cut short or changed is no file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from workbench.files import cache_directory, write_atomically

FOLDER = "merges-1"  # another number when other merges follow from the same vocabulary
LARGE = 1 << 16  # pieces from which on merges are kept
DIGEST_BYTES = 32

Merges = list[tuple[str, str]]


def keep_merges(
    pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int], find: Callable[[], Merges]
) -> Merges:
    """Return the pairs of pieces that `find` returns, in its order: from disk where another call has left them there.

    Args:
        pieces: the texts of the vocabulary, by id, each once.
        scores, kinds: of each.
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
    with suppress(OSError):  # without a cache they are found anew
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(_digest(body) + body))
    return merges


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
