"""The oracle of recurrent layers: a whole text, token by token, from the published equations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.model.recurrent_spec import RecurrentSpec, ShortConvSpec

Linear = Callable[[Tensor, str], Tensor]  # a product of the layer, by its name


def run_recurrent(h: Tensor, w: Mapping[str, Tensor], at: str, spec: RecurrentSpec, linear: Linear) -> Tensor:
    """Return the output of a recurrent layer for the normed rows `h` [token, hidden] of a whole text.

    Args:
        h: the rows.
        w: the model's weights.
        at: the beginning of the names of the layer's.
        spec: the layer.
        linear: computes one of its products.
    """
    if isinstance(spec, ShortConvSpec):
        b, c, x = linear(h, "input").chunk(3, dim=-1)
        return linear(c * _conv(b * x, w, at), "output")
    raise WorkbenchError(f"the oracle has no {spec}")


def _conv(x: Tensor, w: Mapping[str, Tensor], at: str) -> Tensor:
    """Convolve x [token, channel] causally, by sums over the tokens before each."""
    weight, rows = w[at + "conv.weight"], []
    for token in range(len(x)):
        past = x[max(0, token + 1 - weight.shape[1]) : token + 1]
        rows.append((past * weight.T[-len(past) :]).sum(0))
    return torch.stack(rows) + w.get(at + "conv.bias", 0)
