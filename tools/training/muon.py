"""Implement Muon (Jordan et al., 2024): momentum with orthogonalized matrix updates."""

from __future__ import annotations

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """An optimizer for the matrices inside the blocks; embeddings and scales are left to AdamW.

    `dtype` is the type of the iteration's matrix products; bfloat16 is precise enough, but slow on processors without
    it.
    """

    def __init__(
        self, params, lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0, dtype=torch.bfloat16
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                updates = torch.stack([self._momentum(p, group["momentum"]) for p in parameters])
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, orthogonalize(updates, self.dtype), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update.to(parameter.dtype), alpha=-scale)

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        gradient = parameter.grad
        assert gradient is not None
        state["momentum"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state["momentum"], momentum)  # Nesterov's look ahead


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.bfloat16, steps: int = 5) -> Tensor:
    """Return the nearest orthogonal matrix of each of `matrices` [n, rows, columns], by Newton-Schulz iteration.

    The quintic coefficients are the published ones: they push singular values into about [0.7, 1.2], which
    is all the optimizer needs, in `dtype`.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
