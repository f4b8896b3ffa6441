"""Pages that a mask hides from all queries are never read, on every backend (triton: `triton_interpreted.py`)."""

from __future__ import annotations

import pytest

from compiled_kernels import Backend, backend_problems
from tests.compiled_kernels.hidden_pages import BANDS, MASKS, problem


@pytest.mark.sampled(16)
@pytest.mark.parametrize("backend", [Backend.EAGER, Backend.INDUCTOR, Backend.MLIR])
@pytest.mark.parametrize("spans", [(1, 1, 1), (1, 1, 40), (3, 1, 1), (40,)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("operator", ["paged_attention", "quantized_attention"])
def test_hidden_pages_are_not_read(
    operator: str, band: str, mask: str, spans: tuple[int, ...], backend: Backend
) -> None:
    if reason := backend_problems()[backend]:
        pytest.skip(reason)
    assert problem(operator, backend, band, mask, spans, 1) is None
