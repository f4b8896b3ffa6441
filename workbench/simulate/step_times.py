"""Count a step's work in integers and derive its time in whole femtoseconds; the costs can be fitted to recorded steps
by least squares.

Integer ticks make the sum of many steps at once equal to the sum one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from workbench.errors import WorkbenchError
from workbench.model.cost import visible_pairs

TICKS_PER_SECOND = 10**15  # ticks of the simulated clock
REQUIRED_COLUMNS = ("time", "wall_seconds", "prefill_tokens", "decode_tokens", "context_tokens")
MIN_STEPS = 20  # steps needed for a fit
TOKENS = slice(1, 3)  # the token columns of a step's features
MAX_GAP_SECONDS = 2e-3  # longer gaps between steps are idle time


class AttentionReach(NamedTuple):
    """The reach of a set of attention layers: the last `sliding_window` tokens and the first `num_sink_tokens`, or all
    tokens."""

    sliding_window: int | None
    num_sink_tokens: int

    @property
    def max_positions(self) -> int | None:
        """Return the maximum number of positions that one query reads; None is unlimited."""
        return None if self.sliding_window is None else self.sliding_window + self.num_sink_tokens


class StepWork(NamedTuple):
    """The work of one step. `query_key_pairs` and `positions_read` have one count for each `AttentionReach` of the
    model."""

    prefill_tokens: int  # prompt tokens computed
    decode_tokens: int  # tokens decoded
    num_logits: int
    query_key_pairs: tuple[int, ...]
    positions_read: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens


def step_work_of(spans: Iterable[tuple[int, int]], sampled: int, kinds: tuple[AttentionReach, ...]) -> StepWork:
    """Return the work of a step over `spans` of (start, length), with `sampled` rows of logits; spans of one token are
    decodes."""
    prefill = decode = 0
    pairs, read = [0] * len(kinds), [0] * len(kinds)
    for start, length in spans:
        if length == 1:
            decode += 1
        else:
            prefill += length
        for kind, seen in enumerate(kinds):
            if seen.sliding_window is None:
                pairs[kind] += length * start + length * (length + 1) // 2
                read[kind] += start + length
            else:
                some, touched = visible_pairs(start, length, seen.sliding_window, seen.num_sink_tokens)
                pairs[kind] += some
                read[kind] += touched
    return StepWork(prefill, decode, sampled, tuple(pairs), tuple(read))


@dataclass(frozen=True)
class LinearCost:
    """A cost that is linear in a step's work, in ticks; no coefficient is negative."""

    step: int = 0  # ticks of every step
    prefill_tokens: int = 0  # ticks per prompt token
    decode_tokens: int = 0  # ticks per decoded token
    num_logits: int = 0  # ticks per row of logits
    head: int = 0  # ticks of a step with logits
    query_key_pairs: tuple[int, ...] = ()
    positions_read: tuple[int, ...] = ()
    prefill_step: int = 0  # ticks of a step with prompt tokens
    decode_step: int = 0  # ticks of a step with decoded tokens

    def __call__(self, work: StepWork) -> int:
        ticks = (
            self.step
            + self.prefill_tokens * work.prefill_tokens
            + self.decode_tokens * work.decode_tokens
            + self.num_logits * work.num_logits
        )
        if work.num_logits:
            ticks += self.head
        if work.prefill_tokens:
            ticks += self.prefill_step
        if work.decode_tokens:
            ticks += self.decode_step
        for each, count in zip(self.query_key_pairs, work.query_key_pairs, strict=False):
            ticks += each * count
        for each, count in zip(self.positions_read, work.positions_read, strict=False):
            ticks += each * count
        return ticks

    def increment(self, rows: tuple[int, ...]) -> int:
        """Return by how many ticks the next step takes longer if, for each reach, `rows` queries read one more
        position."""
        ticks = 0
        for each, count in zip(self.query_key_pairs, rows, strict=False):
            ticks += each * count
        for each, count in zip(self.positions_read, rows, strict=False):
            ticks += each * count
        return ticks


@dataclass(frozen=True)
class StepTimeModel:
    """A model of step times: the maximum of linear costs, for example compute and memory. `name` states their origin.

    A pipeline cuts a step into at most one microbatch per token, and takes the number with the least time.
    `microbatched` has the costs of a step in 2, 3, ... microbatches, `costs` the costs of an uncut step."""

    name: str
    kinds: tuple[AttentionReach, ...]
    costs: tuple[LinearCost, ...]
    microbatched: tuple[tuple[LinearCost, ...], ...] = ()

    def __call__(self, work: StepWork) -> int:
        return min(max(cost(work) for cost in costs) for costs in self._choices(work))

    def series(self, work: StepWork, growing_queries: tuple[int, ...], extra_ticks: int = 0) -> StepSeries:
        """Return the times of a series of steps.

        The first step does `work` and takes `extra_ticks` more; in each later step `growing_queries` of each reach
        read one more position."""
        choices = [
            [Line(cost(work), cost.increment(growing_queries)) for cost in costs] for costs in self._choices(work)
        ]
        return StepSeries(least_of_maxima(choices), extra_ticks)

    def _choices(self, work: StepWork) -> tuple[tuple[LinearCost, ...], ...]:
        """Return the costs for each possible number of microbatches of a step."""
        return (self.costs, *self.microbatched[: max(0, work.tokens - 1)])


class Line(NamedTuple):
    """A linear series of ticks: step i of a series takes `first` + `more` * i."""

    first: int
    more: int

    def at(self, step: int) -> int:
        return self.first + self.more * step


def least_of_maxima(choices: Sequence[Sequence[Line]]) -> tuple[tuple[int, Line], ...]:
    """Return the minimum over `choices` of the maximum of each choice's lines, as pieces (first step, line that holds
    from it on)."""
    lines = [line for choice in choices for line in choice]
    meetings = {0}
    for number, one in enumerate(lines):
        for other in lines[:number]:
            if one.more != other.more:
                meetings.add((one.first - other.first) // (other.more - one.more) + 1)
    pieces: list[tuple[int, Line]] = []
    for step in sorted(each for each in meetings if each >= 0):  # no lines cross between two of these steps
        line = min((max(choice, key=lambda line: line.at(step)) for choice in choices), key=lambda line: line.at(step))
        if not pieces or pieces[-1][1] != line:
            pieces.append((step, line))
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class StepSeries:
    """The times of a series of steps. Each of `pieces` is (first step, line that holds from it on)."""

    pieces: tuple[tuple[int, Line], ...]
    extra_ticks: int

    def elapsed(self, steps: int) -> int:
        """Return the total ticks of the first `steps` steps."""
        ticks, end = self.extra_ticks if steps else 0, steps
        for begin, (first, more) in reversed(self.pieces):
            if begin < end:
                ticks += (end - begin) * first + more * ((end - begin) * (begin + end - 1) // 2)
                end = begin
        return ticks

    def last_step(self, steps: int) -> int:
        """Return the ticks of step number `steps`, counted from 1."""
        return self.elapsed(steps) - self.elapsed(steps - 1)

    def steps_until(self, ticks: int, steps: int) -> int:
        """Return the smallest number of steps that take `ticks` or longer in total, at most `steps`."""
        low, high = 0, steps
        while low < high:
            middle = (low + high) // 2
            if self.elapsed(middle) >= ticks:
                high = middle
            else:
                low = middle + 1
        return low


def fit_step_times(steps: Sequence[Mapping[str, Any]], where: str = "steps") -> StepTimeModel:
    """Fit step times to the rows of a steps.parquet.

    The fit finds nonnegative seconds per step, per step with prompt tokens, per step with decodes (the two may run in
    separate kernels that each read the weights), per prefill token, decoded token and position read, with the least
    relative errors. A gap shorter than `MAX_GAP_SECONDS` before a step counts as part of it.

    Args:
        steps: Rows with `time`, `wall_seconds`, `prefill_tokens`, `decode_tokens`, `context_tokens`.
        where: Name of the rows in error messages.

    Raises:
        WorkbenchError: For too few rows, or rows without these columns.
    """
    import numpy

    missing = [name for name in REQUIRED_COLUMNS if not steps or steps[0].get(name) is None]
    if missing or len(steps) < MIN_STEPS:
        lack = f"lacks {', '.join(missing)}" if steps and missing else f"has {len(steps)} steps, {MIN_STEPS} are needed"
        raise WorkbenchError(f"{where}: {lack}; run a real experiment with this version, and give its run folder")
    features = numpy.array([_features(step) for step in steps], dtype=float)
    seconds = numpy.array(step_seconds(steps))
    known = (seconds > 0) & (features[:, TOKENS].sum(axis=1) > 0)
    scaled = features[known] / seconds[known, None]
    kept = _independent(features[known])
    while True:
        found = numpy.linalg.lstsq(scaled[:, kept], numpy.ones(len(scaled)), rcond=None)[0]
        if (found >= 0).all():
            break
        kept.remove(kept[int(found.argmin())])
    ticks = dict.fromkeys(range(features.shape[1]), 0)
    ticks.update({column: round(float(value) * TICKS_PER_SECOND) for column, value in zip(kept, found, strict=True)})
    step, prefill, decode, read, prefill_step, decode_step = (ticks[column] for column in range(features.shape[1]))
    form = LinearCost(step, prefill, decode, positions_read=(read,), prefill_step=prefill_step, decode_step=decode_step)
    return StepTimeModel(f"fitted to {len(scaled)} steps of {where}", (AttentionReach(None, 0),), (form,))


def _features(step: Mapping[str, Any]) -> tuple[int, ...]:
    prefill, decode = step["prefill_tokens"], step["decode_tokens"]
    return 1, prefill, decode, step["context_tokens"], prefill > 0, decode > 0


def _independent(features: Any) -> list[int]:
    """Return the linearly independent columns; if all steps have decodes, for example, `a step` covers them."""
    import numpy

    kept: list[int] = []
    for column in range(features.shape[1]):
        if numpy.linalg.matrix_rank(features[:, [*kept, column]]) > len(kept):
            kept.append(column)
    return kept


def step_seconds(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the seconds of each step, counted from the end of the previous step if it followed at once."""
    seconds, before = [], None
    for step in steps:
        pause = step["time"] - step["wall_seconds"] - before if before is not None else MAX_GAP_SECONDS
        seconds.append(step["wall_seconds"] + (pause if 0 <= pause < MAX_GAP_SECONDS else 0.0))
        before = step["time"]
    return seconds
