"""The operators' shape annotations are executed: what they say is what the operators take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters, Spans
from compiled_kernels.paged_attention import PagedKV


def checked(operator: Callable) -> Callable:
    """`operator` with its annotations checked at every call."""
    return jaxtyped(typechecker=beartype)(operator)


def attention(**changes: Any):
    """A right call of paged attention: three tokens of one sequence, two query heads on one group."""
    pages: dict[str, Any] = {
        "keys": torch.zeros(2, 1, 8, 4),
        "values": torch.zeros(2, 1, 8, 4),
        "page_table": torch.tensor([[1]]),
    }
    spans: dict[str, Any] = {"starts": torch.tensor([0, 3]), "context_lengths": torch.tensor([3])}
    kv = PagedKV(**pages | {name: each for name, each in changes.items() if name in pages})
    step = Spans(**spans | {name: each for name, each in changes.items() if name in spans})
    q = torch.zeros(3, 2, 4)
    check_fields(kv, step)
    return checked(compiled_kernels.paged_attention)(q, kv, step, AttentionParameters(0.5), Backend.EAGER)


def check_fields(*values: tuple) -> None:
    """Check the annotations of the fields of named tuples, the same axes in all of them."""
    with jaxtyped("context"):
        for value in values:
            for name, kind in get_type_hints(type(value)).items():
                if not isinstance(getattr(value, name), kind):
                    raise TypeCheckError(f"{name} is no {kind}")


RIGHT: list[tuple[Callable, tuple, int, torch.Tensor]] = [  # and a tensor that is wrong in that place
    (compiled_kernels.rms_norm, (torch.zeros(3, 4), torch.zeros(4), 1e-5), 1, torch.zeros(5)),
    (compiled_kernels.gated_silu, (torch.zeros(3, 8),), 0, torch.zeros(8)),
    (compiled_kernels.rotary, (torch.zeros(3, 2, 4), torch.zeros(3, 2), torch.zeros(3, 2)), 1, torch.zeros(2, 2)),
    (compiled_kernels.linear, (torch.zeros(3, 4), torch.zeros(5, 4), None, Backend.EAGER), 1, torch.zeros(5, 3)),
    (
        compiled_kernels.expert_linear,
        (torch.zeros(3, 4), torch.tensor([0, 1, 0]), torch.zeros(2, 5, 4), None),
        1,
        torch.tensor([0, 1]),
    ),
    (
        compiled_kernels.kv_write,
        (torch.zeros(2, 1, 8, 4), torch.zeros(3, 1, 4), torch.tensor([1, 2, 3])),
        1,
        torch.zeros(3, 1, 5),
    ),
]


@pytest.mark.parametrize(("operator", "arguments", "place", "wrong"), RIGHT)
def test_right_shapes_pass_and_wrong_ones_are_caught(
    operator: Callable, arguments: tuple, place: int, wrong: torch.Tensor
) -> None:
    checked(operator)(*arguments)
    assert attention().shape == (3, 2, 4)
    with pytest.raises(TypeCheckError):
        checked(operator)(*arguments[:place], wrong, *arguments[place + 1 :])


@pytest.mark.parametrize("change", [{"values": torch.zeros(2, 1, 8, 3)}, {"starts": torch.tensor([0.0, 3.0])}])
def test_wrong_attention_shapes_are_caught(change: dict) -> None:
    with pytest.raises(TypeCheckError):
        attention(**change)
