"""A kernel's ceiling is that of the memory which its data lies in: of all copies, where they are read in turn."""

from __future__ import annotations

import pytest

from compiled_kernels.measure import KernelMeasurement
from workbench.bench import kernels
from workbench.machine.ceilings import Ceiling, MachineCeilings

MIB = 1 << 20


@pytest.mark.parametrize(
    ("data", "copies", "size"), [("memory", 64, 256 * MIB), ("cache", 64, 4 * MIB), ("memory", 1, 4 * MIB)]
)
def test_the_working_set_is_what_is_read(data: str, copies: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def planted(*working_sets: int, **_: object) -> MachineCeilings:
        sizes.extend(working_sets)
        return MachineCeilings(tuple(Ceiling("read", 1.0, "", "", 1, 1, 1.0, each) for each in working_sets), ())

    monkeypatch.setattr(kernels, "ceilings_for", planted)
    monkeypatch.setattr(kernels, "measure", lambda *_: KernelMeasurement(data, copies, 4 * MIB))
    kernels.kernel_bench(kernels.timed_cases("rms_norm")[:1], backends=(), threads=1)
    assert sizes == [size]
