"""Estimate the contents of each replica's prefix cache without asking the replica.

The front enters the pages of prompts sent and tokens received, and evicts the least recently used pages beyond the
replica's capacity. The estimate may err in both directions: an error costs time, never a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence


def page_names(ids: Sequence[int], salt: str, page_size: int) -> Iterator[int]:
    """Yield a hash for each whole page of `ids`; it covers the salt and all tokens up to the page's end."""
    name = hash(salt)
    for end in range(page_size, len(ids) + 1, page_size):
        name = hash((name, *ids[end - page_size : end]))
        yield name


class PrefixGuess:
    """An estimate of the contents of a replica's prefix cache: the hashes of at most `capacity` pages."""

    def __init__(self, page_size: int | None, capacity: int):
        """Create an empty estimate; `page_size` in tokens, None for a replica without a prefix cache."""
        self.page_size, self.capacity = page_size, capacity
        self._names: OrderedDict[int, None] = OrderedDict()

    def enter(self, ids: Sequence[int], salt: str) -> None:
        """Enter the whole pages of a text that the replica computes into the estimate."""
        if self.page_size is None:
            return
        for name in reversed([*page_names(ids, salt, self.page_size)]):  # the last page is evicted first
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self.capacity:
            self._names.popitem(last=False)

    def num_tokens(self, ids: Sequence[int], salt: str) -> int:
        """Return the estimated number of a text's tokens in the cache; the last token never counts."""
        if self.page_size is None:
            return 0
        count = 0
        for name in page_names(ids[:-1], salt, self.page_size):
            if name not in self._names:
                break
            count += self.page_size
        return count
