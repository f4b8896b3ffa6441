"""Attention over a quantized cache, from the definition: numpy, float64, one text, no pages, no batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from workbench.kv_cache.format import KVCacheSpec

LEVELS = {"int8": 255, "int4": 15}
MAX_FP8 = 448.0


def below(x: float) -> np.float16:
    """The largest float16 not above x."""
    near = np.float16(x)
    return np.nextafter(near, np.float16(-np.inf)) if float(near) > x else near


def above(x: float) -> np.float16:
    near = np.float16(x)
    return np.nextafter(near, np.float16(np.inf)) if float(near) < x else near


def coded(run: np.ndarray, kind: str) -> np.ndarray:
    """A run of numbers as their codes say."""
    exact = run.astype(np.float32)
    if kind == "dense":
        return exact.astype(np.float64)
    if kind == "fp8":
        scale = np.float32(above(float(np.abs(exact).max() / np.float32(MAX_FP8))))
        codes = torch.from_numpy(exact / (scale or np.float32(1))).clamp(-MAX_FP8, MAX_FP8)
        return codes.to(torch.float8_e4m3fn).double().numpy() * float(scale)
    minimum = np.float32(below(float(exact.min())))
    scale = np.float32(above(float((exact.max() - minimum) / np.float32(LEVELS[kind]))))
    codes = np.clip(np.round((exact - minimum) / (scale or np.float32(1))), 0, LEVELS[kind])
    return float(minimum) + float(scale) * codes.astype(np.float64)


def hadamard(dim: int) -> np.ndarray:
    made = np.ones((1, 1))
    while len(made) < dim:
        made = np.block([[made, made], [made, -made]])
    return made / np.sqrt(dim)


def packed_keys(keys: np.ndarray, shape: KVCacheSpec) -> np.ndarray:
    """[token, group, dim] as codes: for each channel, runs of tokens; unread first tokens have no say."""
    out, group, first = np.full(keys.shape, np.nan), shape.format.quant_group, shape.quantization_rule.num_sink_tokens
    for begin in range(0, len(keys) - group + 1, group):
        for head in range(keys.shape[1]):
            for channel in range(keys.shape[2]):
                run = keys[begin : begin + group, head, channel].copy()
                run[: max(0, min(group, first - begin))] = run[-1]
                out[begin : begin + group, head, channel] = coded(run, shape.format.key_value_formats[0])
    return out


def packed_values(values: np.ndarray, shape: KVCacheSpec) -> np.ndarray:
    """[token, group, dim] as codes: for each token, runs of columns."""
    columns, out = min(shape.format.columns, shape.head_dim), np.full(values.shape, np.nan)
    for token in range(len(values)):
        for head in range(values.shape[1]):
            for begin in range(0, shape.head_dim, columns):
                run = values[token, head, begin : begin + columns]
                out[token, head, begin : begin + columns] = coded(run, shape.format.key_value_formats[1])
    return out


def attended(q: Tensor, k: Tensor, v: Tensor, shape: KVCacheSpec, scale: float) -> Tensor:
    """Queries [token, head, dim] at positions 0, 1, ... over k and v [token, group, dim]: float64."""
    turned = hadamard(shape.head_dim) if shape.format.rotate else np.eye(shape.head_dim)
    stored = [(part.double().numpy() @ turned).astype(np.float32) for part in (k, v)]
    coded_keys, coded_values = packed_keys(stored[0], shape), packed_values(stored[1], shape)
    share, out = q.shape[1] // k.shape[1], np.zeros(q.shape)
    lag, group = shape.format.residual_length, shape.format.quant_group
    first = max(shape.format.num_sink_tokens, shape.num_sink_tokens)
    for t in range(len(q)):
        settled = max(0, (t + 1 - lag) // group * group)
        seen = [
            p
            for p in range(t + 1)
            if shape.sliding_window is None or p > t - shape.sliding_window or p < shape.num_sink_tokens
        ]
        for head in range(q.shape[1]):
            query, at = q[t, head].double().numpy() @ turned, head // share
            rows = [coded_keys if first <= p < settled else stored[0] for p in seen]
            scores = np.array([row[p, at] @ query for row, p in zip(rows, seen, strict=True)]) * scale
            weights = np.exp(scores - scores.max())
            mixed = sum(
                w * (coded_values if first <= p < settled else stored[1])[p, at]
                for w, p in zip(weights / weights.sum(), seen, strict=True)
            )
            out[t, head] = mixed @ turned
    return torch.from_numpy(out)
