"""Work of a step, counted in integers, and its time in whole femtoseconds.

Integer ticks make the sum of many steps at once equal to the sum one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from workbench.model.cost import visible

SECOND = 10**15  # ticks of the simulated clock


class Seen(NamedTuple):
    """Attention layers of equal reach: the last `window` tokens and the first `sinks`, or everything."""

    window: int | None
    sinks: int

    @property
    def most(self) -> int | None:
        """Return the maximum number of positions that one query reads; None is unlimited."""
        return None if self.window is None else self.window + self.sinks


class Work(NamedTuple):
    """Work of one step. `query_key_pairs` and `positions_read` are by `AttentionReach`."""

    prefill: int  # tokens
    decode: int  # tokens
    sampled: int
    pairs: tuple[int, ...]
    read: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prefill + self.decode


def work_of(spans: Iterable[tuple[int, int]], sampled: int, kinds: tuple[Seen, ...]) -> Work:
    """Count the work of a step over `spans` of (start, length); spans of one token are decodes."""
    prefill = decode = 0
    pairs, read = [0] * len(kinds), [0] * len(kinds)
    for start, length in spans:
        if length == 1:
            decode += 1
        else:
            prefill += length
        for kind, seen in enumerate(kinds):
            if seen.window is None:
                pairs[kind] += length * start + length * (length + 1) // 2
                read[kind] += start + length
            else:
                some, touched = visible(start, length, seen.window, seen.sinks)
                pairs[kind] += some
                read[kind] += touched
    return Work(prefill, decode, sampled, tuple(pairs), tuple(read))


@dataclass(frozen=True)
class Form:
    """A linear cost of a step's work, in ticks; no coefficient is negative."""

    step: int = 0
    prefill: int = 0  # a token
    decode: int = 0  # a token
    sampled: int = 0  # a row of logits
    head: int = 0  # a step with any
    pairs: tuple[int, ...] = ()
    read: tuple[int, ...] = ()

    def __call__(self, work: Work) -> int:
        ticks = self.step + self.prefill * work.prefill + self.decode * work.decode + self.sampled * work.sampled
        if work.sampled:
            ticks += self.head
        for each, count in zip(self.pairs, work.pairs, strict=False):
            ticks += each * count
        for each, count in zip(self.read, work.read, strict=False):
            ticks += each * count
        return ticks

    def grows(self, rows: tuple[int, ...]) -> int:
        """Return the extra ticks of the next step, in which `rows` queries of each reach read one position more."""
        ticks = 0
        for each, count in zip(self.pairs, rows, strict=False):
            ticks += each * count
        for each, count in zip(self.read, rows, strict=False):
            ticks += each * count
        return ticks


@dataclass(frozen=True)
class StepTimes:
    """Step times as the maximum of one or two linear costs, for example computing and reading. `name` states their
    origin."""

    name: str
    kinds: tuple[Seen, ...]
    forms: tuple[Form, ...]

    def __call__(self, work: Work) -> int:
        return max(form(work) for form in self.forms)

    def run(self, work: Work, rows: tuple[int, ...], more: int = 0) -> Run:
        """Return the times of a series of steps.

        The first does `work` and takes `extra_ticks` more; in each next one `growing_queries` of each reach read one
        position more."""
        lines = [(form(work), form.grows(rows)) for form in self.forms]
        if len(lines) == 1:
            return Run(*lines[0], *lines[0], 0, more)
        first, second = sorted(lines, reverse=True)
        if second[1] <= first[1]:
            return Run(*first, *first, 0, more)
        return Run(*first, *second, (first[0] - second[0]) // (second[1] - first[1]) + 1, more)


@dataclass(frozen=True, slots=True)
class Run:
    """Times of a series of steps: step i takes a + b i ticks before step `crossover`, and c + d i from there on."""

    a: int
    b: int
    c: int
    d: int
    turn: int
    more: int

    def elapsed(self, steps: int) -> int:
        """Return the ticks of the first `steps` steps."""
        early = min(steps, self.turn)
        ticks = self.c * steps + self.d * (steps * (steps - 1) // 2) + (self.more if steps else 0)
        if early:
            ticks += (self.a - self.c) * early + (self.b - self.d) * (early * (early - 1) // 2)
        return ticks

    def last(self, steps: int) -> int:
        """Return the ticks of the last of `steps` steps."""
        return self.elapsed(steps) - self.elapsed(steps - 1)

    def until(self, ticks: int, steps: int) -> int:
        """Return the smallest number of steps, up to `steps`, that take `ticks` or longer."""
        low, high = 0, steps
        while low < high:
            middle = (low + high) // 2
            if self.elapsed(middle) >= ticks:
                high = middle
            else:
                low = middle + 1
        return low
