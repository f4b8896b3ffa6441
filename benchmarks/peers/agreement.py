"""Compare the logits of each peer with ours before it is timed, within an error bound for its weight format."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from unittest import mock

import torch
from torch import Tensor

from benchmarks.peers.catalog import DENSE_FORMATS, FILE
from compiled_kernels.linear.int8_activations import rounded_to_int8
from workbench.model.hf.weights import random_weights
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.oracle import naive
from workbench.request import random_token_ids

PROMPT_TOKENS = 24  # tokens
QUANT_GROUP_COLUMNS = 32  # columns that share a scale in our INT4
ERROR_MARGIN = 1.5  # groups of 64 have 1.12 times the scale of 32 (normal weights), INT8 activations add a little
MAX_RELATIVE_ERROR = 0.9  # logits of zero are 1 away
ROUNDING_FLOOR = 64 * torch.finfo(torch.float32).eps  # for sums in another order, in float32


def prompt_of(vocab: int, seed: int) -> tuple[int, ...]:
    """Return the token ids of the prompt after which logits are compared."""
    return random_token_ids(random.Random(f"agreement/{seed}"), vocab, PROMPT_TOKENS)


class LogitsReference:
    """Our float32 logits after one prompt, and the relative error allowed to a peer for each weight format.

    The bound for a format is `ERROR_MARGIN` times the relative error of the plain computation (oracle/naive.py) in
    bfloat16 with the weights rounded to that format (float32: against float64), plus `ROUNDING_FLOOR`, at most
    `MAX_RELATIVE_ERROR`. On random weights INT4 alone has an error of half the logits' size, so that bound is weak: a
    peer's dense weights are compared too. For a quantized file the plain computation also rounds the inputs of matrix
    products to INT8 in blocks of columns, as llama.cpp does. `state` holds the weights; without it they are drawn from
    `seed`."""

    def __init__(self, spec: ModelSpec, seed: int, formats: Sequence[str], state: Mapping[str, Tensor] | None = None):
        self.prompt = prompt_of(spec.vocab_size, seed)
        ids = torch.tensor(self.prompt)
        self.exact: dict[str, Tensor] = {}
        self.bounds: dict[str, float] = {}
        for dense in dict.fromkeys("float32" if format == "float32" else "bfloat16" for format in formats):
            given = random_weights(spec, getattr(torch, dense), seed) if state is None else state
            weights = {name: values.float() for name, values in given.items()}
            exact = _last(spec, weights, ids, torch.float32)
            self.exact[dense] = exact
            for format in (each for each in formats if (each == "float32") == (dense == "float32")):
                own = self._own(spec, weights, ids, format)
                self.bounds[format] = bound_for(relative_error(own, exact))

    def _own(self, spec: ModelSpec, state: Mapping[str, Tensor], ids: Tensor, format: str) -> Tensor:
        if format == "float32":
            return _last(spec, state, ids, torch.float64)
        if format == FILE:
            in_blocks: Callable[..., Tensor] = lambda _, x, matrix: rounded_to_int8(x, by_row=False)  # noqa: E731
            with mock.patch.object(naive.Weights, "entering", in_blocks):
                return _last(spec, state, ids, torch.bfloat16)
        rounded = {name: round_to_format(format, values) for name, values in state.items()}
        return _last(spec, rounded, ids, torch.bfloat16)

    def disagreement(self, format: str, logits: Mapping[str, Sequence[float]]) -> dict:
        """Return the relative error of each row of logits against our float32 logits (None: not finite), the error
        bound, and the reason of a disagreement ("" if there is none)."""
        exact = self.exact["float32" if format == "float32" else "bfloat16"]
        bound, reason = self.bounds[format], ""
        errors: dict[str, float | None] = {}
        for name, values in logits.items():
            if len(values) != len(exact):
                reason = f"{name}: {len(values)} logits, the vocabulary has {len(exact)}"
                continue
            found = torch.tensor(values, dtype=torch.float64)
            error = relative_error(found, exact)
            errors[name] = error if math.isfinite(error) else None  # JSON has no NaN
            if not math.isfinite(error):
                reason = f"{name} logits: {int((~found.isfinite()).sum())} of {len(found)} are not finite"
            elif error > bound:
                reason = f"{name} logits are {error:.2g} (relative) away from ours, {bound:.2g} is allowed"
        return {"errors": errors, "bound": bound, "reason": reason or ("" if errors else "no logits were given")}


def bound_for(own_error: float) -> float:
    """Return the relative error allowed to a peer, given the error `own_error` of the plain computation at the same
    precision."""
    return min(MAX_RELATIVE_ERROR, ERROR_MARGIN * own_error + ROUNDING_FLOOR)


def relative_error(values: Tensor, exact: Tensor) -> float:
    """Return |values - exact| / |exact|, with the Euclidean norm over the vocabulary."""
    exact = exact.double()
    return ((values.double() - exact).norm() / exact.norm()).item()


def round_to_format(format: str, values: Tensor) -> Tensor:
    """Return a parameter rounded to a weight format: symmetric INT8 with a scale per row, or INT4 with a scale per 32
    columns.

    Every matrix is rounded, the head and the embedding too, as in some tools; norms, biases and dense formats are
    not."""
    if values.ndim < 2 or format in DENSE_FORMATS:
        return values
    if format == "int8":
        return _rounded(values, 127)
    group = QUANT_GROUP_COLUMNS if values.shape[1] % QUANT_GROUP_COLUMNS == 0 else values.shape[1]
    return _rounded(values.unflatten(1, (-1, group)), 7).flatten(1)


def _rounded(values: Tensor, levels: int) -> Tensor:
    scale = values.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / levels
    return (values / scale).round() * scale


def _last(spec: ModelSpec, state: Mapping[str, Tensor], ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits after the last token, [vocab]."""
    model = Transformer.from_state(spec, {name: values.to(dtype) for name, values in state.items()})
    return naive.logits(model, ids)[-1].double()
