"""The kit for cache formats: what it says of ours, and of ones that break a law."""

from __future__ import annotations

import pytest
import torch

from compiled_kernels.quantized_attention import Settling
from workbench.cache import quantized
from workbench.errors import WorkbenchError
from workbench.testing import check_kv_format
from workbench.testing.report import Report

SMALL = {"format": "int4", "group": 8, "residual": 5}


def broken(report: Report) -> list[str]:
    return [law.law for law in report.laws if not law.ok]


@pytest.mark.parametrize("format", [SMALL, {**SMALL, "format": "int8", "rotate": True, "sinks": 3}])
def test_our_formats_keep_every_law(format: dict) -> None:
    report = check_kv_format(format, examples=2, lanes=("eager",))
    assert report.passed and len(report.laws) == 8, str(report)


def test_settling_by_the_batch_and_not_by_the_position_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query of a chunk reads what the chunk's last one may: prefill in one step is another model then."""

    def packed(self: Settling, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key >= self.first) & (key < self.settled_of(query.max() + 1))

    monkeypatch.setattr(Settling, "packed", packed)
    report = check_kv_format(SMALL, examples=2, lanes=())
    assert "chunked = whole = decoded one by one" in broken(report)


def test_a_group_that_is_not_settled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "settle", lambda *_: None)
    assert "batched = alone" in broken(check_kv_format(SMALL, examples=2, lanes=()))


def test_a_format_that_cannot_be_is_refused() -> None:
    with pytest.raises(WorkbenchError, match="unknown cache format 'int5'"):
        check_kv_format("int5")
