"""A mask that computes with a function of limited domain gives the same text on every backend: hidden pages are found
from bounds, and no page that shows a key is among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

import workbench
from compiled_kernels import backend_problems
from workbench.custom import temporarily_registered

TEXT = "def add(a, b):\n    return a + b\n\n\n" * 6


def near_by_root(query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & ((query - key).float().sqrt() < 6)


def near_by_logarithm(query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & ~((query - key).float().log2() > 5.2)


def near_before(query: Tensor, key: Tensor) -> Tensor:
    """Of a page with the query's own position and later ones the root has no value at one end."""
    return (key <= query) & (((query - key).float() + 0.5).sqrt() < 3) | (key == 0)


@pytest.mark.parametrize("mask", [near_by_root, near_by_logarithm, near_before])
def test_mlir_gives_the_text_of_eager(mask: Callable[[Tensor, Tensor], Tensor]) -> None:
    if reason := {str(name): problem for name, problem in backend_problems().items()}["mlir"]:
        pytest.skip(reason)
    found = []
    with temporarily_registered(mask) as part:
        for backend in ("eager", "mlir"):
            runner = workbench.load("demo", attention={"mask": part}, backend=backend, dtype="float32", page_size=16)
            found.append("".join(event.text for event in runner.stream(TEXT, max_tokens=24, temperature=0)))
    assert found[0] == found[1]
