"""Find break-even points of a claim about time: request sizes at which the roofline's step times cross a threshold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workbench.model.shapes import named_shape
from workbench.simulate.roofline import Hardware, ModelSizes, named_hardware, roofline_step_times
from workbench.simulate.step_times import TICKS_PER_SECOND, StepTimeModel, step_work_of

MAX_TOKENS = 1 << 24  # longest request considered


@dataclass(frozen=True)
class RooflineMachine:
    """One model on `gpus` equal accelerators, with 16 bits per number; its step times are lower bounds."""

    name: str
    times: StepTimeModel

    @classmethod
    def build(cls, shape: str, hardware: str | Hardware, gpus: int = 1) -> RooflineMachine:
        """Build the named shape on hardware named by a data sheet, or given by figures."""
        found = named_hardware(hardware) if isinstance(hardware, str) else hardware
        times = roofline_step_times(ModelSizes.dense(named_shape(shape)), found, gpus)
        return cls(f"{shape}, {gpus} x {found.name}", times)

    def prefill(self, tokens: int) -> float:
        """Return the seconds of a whole prompt in one step."""
        return self._seconds([(0, tokens)])

    def decode(self, context: int, batch: int = 1) -> float:
        """Return the seconds of a step in which each of `batch` requests attends to `context` tokens."""
        return self._seconds([(context - 1, 1)] * batch)

    def _seconds(self, spans: list[tuple[int, int]]) -> float:
        return self.times(step_work_of(spans, len(spans), self.times.kinds)) / TICKS_PER_SECOND


def smallest_where(predicate: Callable[[int], bool], start: int = 1, limit: int = MAX_TOKENS) -> int | None:
    """Return the smallest integer in [start, limit] from which `predicate` holds, by bisection; None if it fails at
    `limit`.

    The predicate must be monotonic.
    """
    if not predicate(limit):
        return None
    low, high = start, limit
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if predicate(middle) else (middle + 1, high)
    return low


def prefill_break_even_points(machine: RooflineMachine) -> dict[str, int | None]:
    """Return prompt lengths in tokens at which prefill time changes its growth.

    Time is flat while within 10% of the time of one token. Doubling the prompt counts as doubling time from a factor
    of 1.9 on, and as more than doubling from 2.2 on; it triples time once attention is half of the work.
    """
    flat = smallest_where(lambda n: machine.prefill(n) > 1.1 * machine.prefill(1))
    return {
        "flat up to": None if flat is None else flat - 1,
        "linear from": smallest_where(lambda n: machine.prefill(2 * n) >= 1.9 * machine.prefill(n)),
        "more than linear from": smallest_where(lambda n: machine.prefill(2 * n) >= 2.2 * machine.prefill(n)),
        "tripled by doubling from": smallest_where(lambda n: machine.prefill(2 * n) >= 3.0 * machine.prefill(n)),
    }


def decode_break_even_points(machine: RooflineMachine, batch: int = 1) -> dict[str, int | None]:
    """Return the contexts from which a decode step takes 10% longer than at 100 tokens, and twice as long."""
    least = machine.decode(100, batch)
    return {
        f"{name} from": smallest_where(lambda n, times=times: machine.decode(n, batch) >= times * least, 100)
        for name, times in (("10% longer", 1.1), ("twice as long", 2.0))
    }
