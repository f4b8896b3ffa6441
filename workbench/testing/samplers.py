"""Check a user-defined filter or sampler against the laws of the built-in ones.

Rows of logits are random, tied, constant, peaked, or have tokens already removed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from workbench.custom import build_custom, resolve_path
from workbench.request import CustomPart
from workbench.sampling.combiners import combiner_of
from workbench.sampling.filters import History
from workbench.sampling.samplers import uniform
from workbench.testing.law import ConformityReport, Law, LawBroken, check_law

ROW_KINDS = ("random", "tied", "constant", "peaked", "wide")
REMOVED_AMOUNTS = ("none", "some", "half", "all but one")


@dataclass(frozen=True, eq=False)
class LogitsRow:
    """A row of logits [vocab] with at least one finite entry, the tokens before it, and a description."""

    logits: Tensor
    history: History
    kind: str

    def others(self, count: int) -> Tensor:
        """Return `count` further rows of logits [row, vocab] to combine with this row, in place of those of earlier
        layers or other streams; equal in every call.
        """
        first = int(self.logits.nan_to_num(neginf=0.0).double().sum().abs() * 1e3) % 2**31
        generator = torch.Generator().manual_seed(first)
        return torch.randn(count, len(self.logits), generator=generator) * 3

    def __repr__(self) -> str:
        return f"a row of {len(self.logits)} logits ({self.kind})"

    @classmethod
    def generic(cls, vocab: int, seed: int, history: History) -> LogitsRow:
        """Return a row of normally distributed logits, in which no two tokens are nearly equal."""
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(vocab, generator=generator), history, f"normal, seed {seed}")


def make_logits(vocab: int, kind: str, removed: str, seed: int) -> Tensor:
    """Return drawn logits [vocab] of one of `ROW_KINDS`, with some tokens removed; at least one token is left."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(vocab, generator=generator)
    logits = {
        "random": noise * 3,
        "tied": (noise * 2).round(),
        "constant": torch.full((vocab,), float(seed % 7) - 3),
        "peaked": noise + 40 * (torch.arange(vocab) == seed % vocab),
        "wide": noise * 1e4,
    }[kind]
    order = torch.randperm(vocab, generator=generator)
    gone = {"none": 0, "some": vocab // 8, "half": vocab // 2, "all but one": vocab - 1}[removed]
    logits[order[:gone]] = -torch.inf
    return logits


def logits_rows(vocab: int) -> st.SearchStrategy[LogitsRow]:
    """Return a hypothesis strategy for rows of logits of one vocabulary, each with its own history."""
    tokens = st.lists(st.integers(0, vocab - 1), max_size=8)

    def row(kind: str, removed: str, seed: int, prompt: list[int], output: list[int]) -> LogitsRow:
        label = f"{kind}, removed: {removed}, seed {seed}"
        return LogitsRow(make_logits(vocab, kind, removed, seed), History(prompt, output), label)

    seeds = st.integers(0, 10_000)
    return st.builds(row, st.sampled_from(ROW_KINDS), st.sampled_from(REMOVED_AMOUNTS), seeds, tokens, tokens)


Check = Callable[[Any, list[LogitsRow], int], None]


def check_sampler(
    part: object, vocab: int = 64, examples: int = 50, arguments: Mapping[str, Any] | None = None
) -> ConformityReport:
    """Try `part` on many rows of logits, and report for each law whether it holds.

    Args:
        part: a filter, a filter that also combines other logits, or a sampler: an instance, a class, a function, or an
            import path as in a configuration (`package.module:Name`, `folder/file.py:Name`).
        vocab: size of the vocabulary.
        examples: number of rows tried for each law, the same in every call.
        arguments: arguments of `part`'s constructor, if it is a class.

    Raises:
        WorkbenchError: if `part` cannot be found or built.
    """
    name = part if isinstance(part, str) else getattr(part, "__qualname__", None) or repr(part)
    made = build_custom(resolve_path(part) if isinstance(part, str) else part, arguments or {}, name)
    if callable(getattr(made, "choose", None)):
        kind, laws = "sampler", SAMPLER_LAWS
    elif callable(made):
        combiner = combiner_of(made, CustomPart(path=name))
        kind, laws = "filter" if combiner is None else "combiner", FILTER_LAWS
    else:
        return ConformityReport(name, (Law("is a filter or a sampler", False, "has neither choose() nor __call__()"),))
    drawn = st.lists(logits_rows(vocab), min_size=3, max_size=3), st.integers(0, 2**63 - 1)
    tried = (check_law(law, functools.partial(check, made), examples, *drawn) for law, check in laws.items())
    return ConformityReport(f"{kind} {name}", tuple(tried))


def _apply(part: Any, logits: Tensor, rows: list[LogitsRow]) -> Tensor:
    """Call `part` with the logits [sample, vocab] of `rows`, their histories, and, if it combines them, other logits.
    """
    histories, layers = [row.history for row in rows], getattr(part, "layers", None)
    if layers is not None:
        return part(logits, histories, torch.stack([row.others(len(layers)) for row in rows], 1))
    if hasattr(part, "second_prompt"):
        return part(logits, histories, torch.cat([row.others(1) for row in rows]))
    return part(logits, histories)


def _filtered(part: Any, row: LogitsRow) -> Tensor:
    """Return the row that `part` returns for `row`, checked for shape and type."""
    logits = row.logits[None].clone()
    try:
        out = _apply(part, logits, [row])
    except Exception as error:
        raise LawBroken(f"raised {type(error).__name__}: {error}, on {row}") from error
    _require(isinstance(out, Tensor), f"returned {type(out).__name__}, not a tensor, on {row}")
    _require(out.shape == logits.shape, f"returned shape {tuple(out.shape)} for {tuple(logits.shape)}, on {row}")
    _require(out.dtype == logits.dtype, f"returned {out.dtype} for {logits.dtype}, on {row}")
    return out[0]


def _filter_answers(part: Any, some: list[LogitsRow], seed: int) -> None:
    _filtered(part, some[0])


def _filter_keeps_input(part: Any, some: list[LogitsRow], seed: int) -> None:
    logits = some[0].logits[None].clone()
    _apply(part, logits, some[:1])
    _require(torch.equal(logits[0], some[0].logits), f"changed its input in place, on {some[0]}")


def _filter_leaves_a_token(part: Any, some: list[LogitsRow], seed: int) -> None:
    out = _filtered(part, some[0])
    _require(not bool(out.isnan().any()), f"returned NaN, on {some[0]}")
    _require(not bool((out == torch.inf).any()), f"returned +inf, on {some[0]}")
    _require(bool((out > -torch.inf).any()), f"removed every token, on {some[0]}")


def _filter_resurrects_none(part: Any, some: list[LogitsRow], seed: int) -> None:
    out = _filtered(part, some[0])
    back = ((some[0].logits == -torch.inf) & (out != -torch.inf)).nonzero()[:, 0].tolist()
    _require(not back, f"brought removed tokens {back[:5]} back, on {some[0]}")


def _filter_forgets(part: Any, some: list[LogitsRow], seed: int) -> None:
    first = _filtered(part, some[0])
    for other in some[1:]:
        _filtered(part, other)
    again = _filtered(part, some[0])
    _require(_same(first, again), f"answered differently after seeing other requests' rows, on {some[0]}")


def _filter_ignores_neighbours(part: Any, some: list[LogitsRow], seed: int) -> None:
    # A row without near ties: rounding that depends on the number of rows must not matter.
    row = LogitsRow.generic(len(some[0].logits), seed, some[0].history)
    alone = _filtered(part, row)
    for place in range(3):
        batch = [*some[1:]]
        batch.insert(place, row)
        together = _apply(part, torch.stack([each.logits for each in batch]), batch)
        shape = tuple(together.shape)
        _require(shape == (3, len(alone)), f"returned shape {shape} for 3 rows, on {row}")
        near = torch.allclose(together[place], alone, rtol=1e-4, atol=1e-4)
        _require(near, f"gave a row another answer in a batch with {batch[place - 1]} than alone, on {row}")


def _chosen(part: Any, row: LogitsRow, draw: float, state: Any) -> tuple[int, Any]:
    try:
        token, after = part.choose(row.logits.clone(), draw, state)
        return int(token), after
    except Exception as error:
        raise LawBroken(f"raised {type(error).__name__}: {error}, on {row}") from error


def _sample_request(part: Any, some: list[LogitsRow], seed: int, length: int = 6) -> list[int]:
    """Sample one request's tokens from its start, over `some` rows in turn."""
    state, tokens = part.start(), []
    for position in range(length):
        token, state = _chosen(part, some[position % len(some)], uniform(seed, position), state)
        tokens.append(token)
    return tokens


def _sampler_answers(part: Any, some: list[LogitsRow], seed: int) -> None:
    _sample_request(part, some, seed)


def _sampler_keeps_to_what_is_left(part: Any, some: list[LogitsRow], seed: int) -> None:
    for position, token in enumerate(_sample_request(part, some, seed)):
        row = some[position % len(some)]
        _require(0 <= token < len(row.logits), f"chose {token}, which is no token, on {row}")
        _require(float(row.logits[token]) > -torch.inf, f"chose token {token}, which was removed, on {row}")
    for draw in (0.0, 1 - 2.0**-53):
        token, _ = _chosen(part, some[0], draw, part.start())
        removed = not 0 <= token < len(some[0].logits) or float(some[0].logits[token]) == -torch.inf
        _require(not removed, f"chose {token}, removed or no token, for the number {draw}, on {some[0]}")


def _sampler_repeats(part: Any, some: list[LogitsRow], seed: int) -> None:
    first, again = _sample_request(part, some, seed), _sample_request(part, some, seed)
    _require(first == again, f"gave {first}, then {again}, for the same seed, on {some[0]}")


def _sampler_keeps_its_state_outside(part: Any, some: list[LogitsRow], seed: int) -> None:
    alone = _sample_request(part, some, seed)
    mine, other, tokens = part.start(), part.start(), []
    for position in range(len(alone)):
        _, other = _chosen(part, some[-1 - position % len(some)], uniform(seed + 1, position), other)
        token, mine = _chosen(part, some[position % len(some)], uniform(seed, position), mine)
        tokens.append(token)
    advice = "keep what must be remembered in the state that start() and choose() return, not in the object"
    _require(tokens == alone, f"gave {tokens} with another request, {alone} alone: {advice}; on {some[0]}")


def _sampler_is_a_function(part: Any, some: list[LogitsRow], seed: int) -> None:
    state = part.start()
    for position, row in enumerate(some):
        before = copy.deepcopy(state)
        first, after = _chosen(part, row, uniform(seed, position), state)
        again, _ = _chosen(part, row, uniform(seed, position), before)
        _require(first == again, f"gave {first}, then {again}, for the same row, number and state, on {row}")
        repeated, _ = _chosen(part, row, uniform(seed, position), state)
        _require(first == repeated, f"changed the state it was given instead of returning a new one, on {row}")
        state = after


def _sampler_keeps_input(part: Any, some: list[LogitsRow], seed: int) -> None:
    logits = some[0].logits.clone()
    part.choose(logits, uniform(seed, 0), part.start())
    _require(torch.equal(logits, some[0].logits), f"changed its input in place, on {some[0]}")


def _same(first: Tensor, second: Tensor) -> bool:
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _require(true: bool, otherwise: str) -> None:
    if not true:
        raise LawBroken(otherwise)


FILTER_LAWS: dict[str, Check] = {
    "never raises on rows with a finite token, and keeps shape and type": _filter_answers,
    "leaves its input as it was": _filter_keeps_input,
    "leaves at least one token, and neither NaN nor +inf": _filter_leaves_a_token,
    "brings no removed token back": _filter_resurrects_none,
    "remembers nothing of other requests": _filter_forgets,
    "treats a row alike whatever its neighbours": _filter_ignores_neighbours,
}
SAMPLER_LAWS: dict[str, Check] = {
    "never raises on rows with a finite token": _sampler_answers,
    "chooses only tokens that are left": _sampler_keeps_to_what_is_left,
    "draws the same for the same seed and position": _sampler_repeats,
    "is untouched by other requests": _sampler_keeps_its_state_outside,
    "is a function of row, number and state": _sampler_is_a_function,
    "leaves its input as it was": _sampler_keeps_input,
}
