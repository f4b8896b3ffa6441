"""Know about what each replica has in its prefix cache, without asking it.

The front enters what it sends and what comes back, by pages, and forgets those used longest ago when there are
more than the replica has. It may be wrong in both directions: a wrong guess costs time, never a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence


def page_names(ids: Sequence[int], salt: str, page_size: int) -> Iterator[int]:
    """Yield a name for each whole page of `ids`, which says all tokens up to its end, and the salt."""
    name = hash(salt)
    for end in range(page_size, len(ids) + 1, page_size):
        name = hash((name, *ids[end - page_size : end]))
        yield name


class PrefixGuess:
    """The pages that a replica's prefix cache is thought to have, by name; of at most `capacity` pages."""

    def __init__(self, page_size: int | None, capacity: int):
        """`page_size` is in tokens; None for a replica without a prefix cache."""
        self.page_size, self.capacity = page_size, capacity
        self._names: OrderedDict[int, None] = OrderedDict()

    def enter(self, ids: Sequence[int], salt: str) -> None:
        """Enter the whole pages of a text that the replica computes."""
        if self.page_size is None:
            return
        for name in reversed([*page_names(ids, salt, self.page_size)]):  # the last is the first to be forgotten
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self.capacity:
            self._names.popitem(last=False)

    def num_tokens(self, ids: Sequence[int], salt: str) -> int:
        """Return how many tokens of a text are thought to be cached, all but its last one at most."""
        if self.page_size is None:
            return 0
        count = 0
        for name in page_names(ids[:-1], salt, self.page_size):
            if name not in self._names:
                break
            count += self.page_size
        return count
