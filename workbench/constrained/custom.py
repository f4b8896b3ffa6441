"""Constrain answers by a user-defined class that forbids tokens and receives each accepted token."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.constrained.closing import NodeBudget
from workbench.constrained.constraint import Constraint, Taken
from workbench.custom import load_verbs, resolve_path
from workbench.errors import WorkbenchError, describe_error
from workbench.request import CustomPart, FinishReason

VERBS = {"start": "(tokens, end_token_ids)", "banned": "(ids)", "advance": "(token)"}


class TokenConstraint(Protocol):
    """The interface of a user-defined constraint; one instance is built for each sample of a request."""

    def start(self, tokens: Sequence[bytes], end_token_ids: frozenset[int], /) -> object:
        """Begin an answer. `tokens` has each token's text, empty for a control token."""
        ...

    def banned(self, ids: Sequence[int], /) -> NDArray[np.bool_]:
        """Return the forbidden next tokens, [vocab], after the draft tokens `ids`, which are not accepted yet."""
        ...

    def advance(self, token: int, /) -> object:
        """Accept the next token, which is not an end token; return True if the answer is complete."""
        ...


class CustomConstraint(Constraint):
    """A user-defined constraint of one request; its exceptions and invalid results fail only that request."""

    def __init__(self, part: CustomPart, tokens: Sequence[bytes], end_token_ids: Collection[int]):
        self._name, self._vocab_size = f"constraint {part.path}", len(tokens)
        if not inspect.isclass(resolve_path(part.path)):
            raise WorkbenchError(f"{self._name}: is not a class; each sample of a request needs an instance of its own")
        self._part: TokenConstraint = load_verbs(part, "constraint", VERBS)
        self._end_ids = frozenset(end_token_ids)
        self._rows: dict[tuple[int, ...], NDArray[np.bool_]] = {}  # masks by draft, after the accepted tokens
        self._call("start", tuple(tokens), self._end_ids)

    def legal_count(self, draft: Sequence[int]) -> int:
        try:
            return super().legal_count(draft)
        except WorkbenchError:  # the error recurs with the next token's mask, and ends the request there
            return 0

    def banned(self, draft: Sequence[int] = ()) -> NDArray[np.bool_]:
        banned = np.zeros((1 + len(draft), self._vocab_size), np.bool_)
        for place in range(1 + len(draft)):
            banned[place] = self._row(tuple(draft[:place]))
            if place < len(draft) and (banned[place, draft[place]] or draft[place] in self._end_ids):
                break
        if banned[0].all():
            raise WorkbenchError(f"{self._name}: allows no token")
        return banned

    def advance(self, token: int, budget: NodeBudget | None = None) -> Taken:
        if self._row(())[token]:
            raise WorkbenchError(f"{self._name}: forbids token {token}")
        is_complete = token in self._end_ids or self._call("advance", token)
        if not isinstance(is_complete, bool | np.bool_ | None):
            raise WorkbenchError(f"{self._name}: advance must return True if the answer ends, not {is_complete!r}")
        self._rows = {draft[1:]: row for draft, row in self._rows.items() if draft[:1] == (token,)}
        return token, FinishReason.STOP if is_complete else None

    def _row(self, draft: tuple[int, ...]) -> NDArray[np.bool_]:
        row = self._rows.get(draft)
        if row is None:
            row = self._call("banned", draft, to=np.array)
            if row.dtype != np.bool_ or row.shape != (self._vocab_size,):
                shape = f"{list(row.shape)} of {row.dtype}"
                raise WorkbenchError(f"{self._name}: banned must return [{self._vocab_size}] of bool, not {shape}")
            self._rows[draft] = row
        return row

    def _call(self, verb: str, *values: Any, to: Callable[[Any], Any] | None = None) -> Any:
        """Call a method of the user's class, and convert its result by `to`."""
        try:
            value = getattr(self._part, verb)(*values)
            return value if to is None else to(value)
        except Exception as error:
            raise WorkbenchError(f"{self._name}: {verb}: {' '.join(describe_error(error).split())}") from error
