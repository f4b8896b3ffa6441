"""Define decoding methods: objects that choose tokens for a group of sequences from all their rows of logits.

    (none)    each sequence alone: the sampler chooses from its rows
    Pair      a sequence and its second stream (another prompt): one token for both, from both rows
    Beams     the best continuations of all texts; also user-defined searches

The sequences of a method wait for each other. The method stores a row of each, and advances them together once it has
all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from workbench.request import Sequence
from workbench.sampling.samplers import SampledToken

# Continues the sequences of a group by (sequence, next token) pairs; returns the sequences of the results in this
# order.
Fork = Callable[[list[Sequence], list[tuple[Sequence, int]]], list[Sequence]]


class NextRow(NamedTuple):
    """The results of a step for the last token of one sequence, from which its next token is chosen."""

    logits: Tensor  # [vocab]
    states: Mapping[int, Tensor]  # hidden states [hidden] by layer, for the requested layers
    early: Mapping[int, Tensor]  # logits of early layers [1, vocab] by layer, for combiners


class TimedToken(NamedTuple):
    token: SampledToken
    time: float  # seconds, on the runner's clock
    step: int


@dataclass(frozen=True)
class Advance:
    """The next tokens of a sequence, or with `is_whole` its complete output."""

    sequence: Sequence
    tokens: Many[TimedToken]
    is_whole: bool = False
    score: float | None = None
    not_chosen: str = ""  # why a complete output is not returned


class Decoding(Protocol):
    """A decoding method for some sequences of one request."""

    @property
    def sequences(self) -> Many[Sequence]:
        """Return the sequences that clients see; if one of them fails, all end."""
        ...

    @property
    def hidden(self) -> Many[Sequence]:
        """Return the sequences that clients do not see. They have no events, get the tokens of the first sequence, and
        end with it.
        """
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the layers with hidden states that the method reads."""
        ...

    @property
    def is_ready(self) -> bool:
        """Return whether all sequences are ready to advance: each has a row of results and has computed all its known
        tokens.
        """
        ...

    def add(self, sequence: Sequence, row: NextRow) -> str:
        """Store the row of results after the text of one sequence; return what is wrong with the row, or an empty
        string.
        """
        ...

    def advance(self, step: int, now: float, fork: Fork) -> list[Advance]:
        """Choose the next tokens of the sequences.

        Args:
            step: the number of the step.
            now: seconds, on the runner's clock.
            fork: continues sequences that share pages.

        Raises:
            WorkbenchError: a user-defined part fails.
        """
        ...
