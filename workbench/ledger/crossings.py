"""Find break-even points of a claim about time: request sizes at which the roofline's step times cross a threshold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workbench.fleet.hardware import Hardware, named_hardware
from workbench.fleet.roofline import Sizes, roofline
from workbench.fleet.work import SECOND, StepTimes, work_of
from workbench.model.shapes import named_shape

MOST = 1 << 24  # longest request considered


@dataclass(frozen=True)
class Machine:
    """One model on `gpus` accelerators of one kind, in 16 bits a number; its step times are lower bounds."""

    name: str
    times: StepTimes

    @classmethod
    def of(cls, shape: str, hardware: str | Hardware, gpus: int = 1) -> Machine:
        """Build the named shape on a data sheet's machine, or on hardware figures."""
        found = named_hardware(hardware) if isinstance(hardware, str) else hardware
        times = roofline(Sizes.dense(named_shape(shape)), found, gpus)
        return cls(f"{shape}, {gpus} x {found.name}", times)

    def prefill(self, tokens: int) -> float:
        """Return the seconds of a whole prompt in one step."""
        return self._seconds([(0, tokens)])

    def decode(self, context: int, batch: int = 1) -> float:
        """Return the seconds of a step in which each of `batch` requests attends to `context` tokens."""
        return self._seconds([(context - 1, 1)] * batch)

    def _seconds(self, spans: list[tuple[int, int]]) -> float:
        return self.times(work_of(spans, len(spans), self.times.kinds)) / SECOND


def first(true: Callable[[int], bool], least: int = 1, most: int = MOST) -> int | None:
    """Return the least integer in [start, limit] from which `predicate` holds, by bisection; None where it fails at
    `limit`.

    The predicate must be monotonic.
    """
    if not true(most):
        return None
    low, high = least, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if true(middle) else (middle + 1, high)
    return low


def prefill_crossings(machine: Machine) -> dict[str, int | None]:
    """Return prompt lengths in tokens at which prefill time changes its growth.

    Time is flat within 10% of one token's. Doubling the prompt doubles time from 1.9 times on, more than doubles it
    from 2.2 times on, and triples it once attention is half of the work.
    """
    flat = first(lambda n: machine.prefill(n) > 1.1 * machine.prefill(1))
    return {
        "flat up to": None if flat is None else flat - 1,
        "linear from": first(lambda n: machine.prefill(2 * n) >= 1.9 * machine.prefill(n)),
        "more than linear from": first(lambda n: machine.prefill(2 * n) >= 2.2 * machine.prefill(n)),
        "tripled by doubling from": first(lambda n: machine.prefill(2 * n) >= 3.0 * machine.prefill(n)),
    }


def decode_crossings(machine: Machine, batch: int = 1) -> dict[str, int | None]:
    """Return the contexts from which a decode step takes 10% longer than at 100 tokens, and twice as long."""
    least = machine.decode(100, batch)
    return {
        f"{told} from": first(lambda n, times=times: machine.decode(n, batch) >= times * least, 100)
        for told, times in (("10% longer", 1.1), ("twice as long", 2.0))
    }
