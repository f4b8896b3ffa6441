"""From which size on a statement about time is true: one request on a machine as the roofline has it, and the sizes at
which its times cross a line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workbench.fleet.hardware import Hardware, named_hardware
from workbench.fleet.roofline import Sizes, roofline
from workbench.fleet.work import SECOND, StepTimes, work_of
from workbench.model.shapes import named_shape

MOST = 1 << 24  # tokens beyond which nobody asks


@dataclass(frozen=True)
class Machine:
    """One model on `gpus` of a hardware, in 16 bits a number; its step times are lower bounds."""

    name: str
    times: StepTimes

    @classmethod
    def of(cls, shape: str, hardware: str | Hardware, gpus: int = 1) -> Machine:
        """The named shape on a data sheet's machine, or on figures."""
        found = named_hardware(hardware) if isinstance(hardware, str) else hardware
        times = roofline(Sizes.dense(named_shape(shape)), found, gpus)
        return cls(f"{shape}, {gpus} x {found.name}", times)

    def prefill(self, tokens: int) -> float:
        """Seconds of a whole prompt in one step."""
        return self._seconds([(0, tokens)])

    def decode(self, context: int, batch: int = 1) -> float:
        """Seconds of a step in which each of `batch` requests reads `context` tokens."""
        return self._seconds([(context - 1, 1)] * batch)

    def _seconds(self, spans: list[tuple[int, int]]) -> float:
        return self.times(work_of(spans, len(spans), self.times.kinds)) / SECOND


def first(true: Callable[[int], bool], least: int = 1, most: int = MOST) -> int | None:
    """The least number from which `true` holds, for what holds from some number on; None beyond `most`."""
    if not true(most):
        return None
    low, high = least, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if true(middle) else (middle + 1, high)
    return low


def prefill_crossings(machine: Machine) -> dict[str, int | None]:
    """Prompt lengths: up to which time is flat (within 10% of one token's), from which doubling the prompt doubles it
    (1.9 times), from which it more than doubles it (2.2 times), and from which it triples it, attention being half."""
    flat = first(lambda n: machine.prefill(n) > 1.1 * machine.prefill(1))
    return {
        "flat up to": None if flat is None else flat - 1,
        "linear from": first(lambda n: machine.prefill(2 * n) >= 1.9 * machine.prefill(n)),
        "more than linear from": first(lambda n: machine.prefill(2 * n) >= 2.2 * machine.prefill(n)),
        "tripled by doubling from": first(lambda n: machine.prefill(2 * n) >= 3.0 * machine.prefill(n)),
    }


def decode_crossings(machine: Machine, batch: int = 1) -> dict[str, int | None]:
    """Contexts from which a decode step takes 10% longer than at 100 tokens, and twice as long."""
    least = machine.decode(100, batch)
    return {
        f"{told} from": first(lambda n, times=times: machine.decode(n, batch) >= times * least, 100)
        for told, times in (("10% longer", 1.1), ("twice as long", 2.0))
    }
