"""Turn rows of logits into tokens where the sampler alone does not: a method of decoding is a value beside sequences.

    (none)    each sequence alone: the sampler chooses from its rows
    Pair      a sequence and one with another prompt: one token for both, from both rows
    Beams     the best continuations of all texts go on; a search of a user's own is one

The sequences of a method wait for each other. It keeps a row of each, and once it has all it advances them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from workbench.request import Sequence
from workbench.sampling.samplers import SampledToken

# Continues sequences of one group by (sequence, next token), and returns those that hold the texts, in this order.
Fork = Callable[[list[Sequence], list[tuple[Sequence, int]]], list[Sequence]]


class NextRow(NamedTuple):
    """Hold what a step computed after the text of one sequence."""

    logits: Tensor  # [vocab]
    states: Mapping[int, Tensor]  # [hidden], by layer: those after the layers that were asked for
    early: Mapping[int, Tensor]  # [1, vocab], by layer: logits of early layers, which filters combine


class TimedToken(NamedTuple):
    token: SampledToken
    time: float  # seconds, on the runner's clock
    step: int


@dataclass(frozen=True)
class Advance:
    """The next tokens of a sequence, or with `is_whole` all of its output and its end."""

    sequence: Sequence
    tokens: Many[TimedToken]
    is_whole: bool = False
    score: float | None = None
    not_chosen: str = ""  # why a whole output is not returned


class Decoding(Protocol):
    """A method of decoding, of some sequences of one request."""

    @property
    def sequences(self) -> Many[Sequence]:
        """Return the sequences that clients see: one that fails ends all of them."""
        ...

    @property
    def hidden(self) -> Many[Sequence]:
        """Return the sequences that no event speaks of. They get the tokens of the first, and end with it."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the layers after which it wants the states of its rows."""
        ...

    @property
    def is_ready(self) -> bool:
        """Return whether there is a row for each sequence, and each has computed all that it knows."""
        ...

    def add(self, sequence: Sequence, row: NextRow) -> str:
        """Keep the row after the text of one of the sequences; return what is wrong with it, or an empty string."""
        ...

    def advance(self, step: int, now: float, fork: Fork) -> list[Advance]:
        """Choose how the sequences go on.

        Args:
            step: the number of the step.
            now: seconds, on the runner's clock.
            fork: continues the sequences where they share pages.

        Raises:
            WorkbenchError: a part of the user's own fails.
        """
        ...
