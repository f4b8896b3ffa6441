"""Figures of claims on the KV cache in numbers: its size, what fits beside the weights, and its savings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.display import Table
from workbench.memory.report import report_for
from workbench.model.cost import visible_pairs

LLAMA = "shape:llama-3.1-70b"
FULL = 128_000  # tokens; the sources write 128K
CARD = 80e9


def _llama(context: int = FULL, **settings: Any) -> dict[str, Any]:
    return report_for(LLAMA, context=context, dtype="float16", **settings)


def figures_of_128k() -> Sequence[Table]:
    """Tabulate the 30 and the 40 GB: the number of tokens and the unit in which each is right."""
    rows = []
    for label, tokens in (("128,000", FULL), ("131,072 (128 Ki)", 1 << 17), ("100,000", 100_000), ("91,552", 91_552)):
        size = _llama(tokens)["cache_bytes"]
        rows.append((label, f"{size / 1e9:.2f}", f"{size / 2**30:.2f}"))
    reach = int(30e9 // _llama()["cache_bytes_per_token"])
    title = f"Llama 3 70B in FP16: cache of one text; 30 GB are full at {reach:,} tokens"
    half = f"{_llama(cache='int8')['cache_bytes'] / 1e9:.2f}"
    return [Table(title, [*rows, ("128,000, INT8", half, "")], ("tokens", "GB", "GiB"))]


def sessions(shape: str = LLAMA, context: int = FULL) -> dict[str, float]:
    """Count full texts on one card: beside the weights, without them, and with both quantized."""

    def fit(**settings: Any) -> dict[str, Any]:
        return report_for(shape, context=context, dtype="float16", memory="80GB", **settings)

    dense = fit()
    return {
        "weights_gb": dense["weight_bytes"] / 1e9,
        "session_gb": dense["cache_bytes"] / 1e9,
        "sessions": dense["sequences"],
        "sessions_without_weights": int(CARD // dense["cache_bytes"]),
        "sessions_int4": fit(weights="int4")["sequences"],
        "sessions_int4_both": fit(weights="int4", cache="int4")["sequences"],
    }


def cards() -> Sequence[Table]:
    formats = (("FP16, FP16", "dense", "dense"), ("INT8, INT8", "int8", "int8"), ("INT4, INT4", "int4", "int4"))
    rows = []
    for card, size in (("H100", 80), ("H200", 141)):
        for count in (1, 2, 3, 4, 8):
            fit = [_llama(memory=f"{count * size}GB", weights=w, cache=c)["sequences"] for _, w, c in formats]
            rows.append((f"{count} x {card}", *map(str, fit)))
    names = tuple(f"{name} (weights, cache)" for name, *_ in formats)
    return [Table("Llama 3.1 70B: requests of 128,000 tokens beside the weights", rows, ("cards", *names))]


def growth(tokens: int = 32_768, scores: bool = False) -> dict[str, float]:
    """Return the growth of cache bytes and query-key pairs when tokens double.

    With `scores`, attention also stores one layer's scores (float32) of the whole text.
    """

    def size(n: int) -> float:
        return _llama(n)["cache_bytes"] + (64 * n * n * 4 if scores else 0)

    return {
        "cache_times": size(2 * tokens) / size(tokens),
        "pairs_times": visible_pairs(0, 2 * tokens, None)[0] / visible_pairs(0, tokens, None)[0],
    }


def outgrowing(shapes: Sequence[str] = ("llama-3.1-8b", "llama-3.1-70b")) -> dict[str, float]:
    """Return the share of models whose weights at most 64 texts of full length outgrow, so that both fit into eight
    cards of 80 GB; and the tokens of all requests together from which the cache is larger, by model."""
    figures, fitting = {}, 0
    for shape in shapes:
        report = report_for(f"shape:{shape}", dtype="float16")
        tokens = report["weight_bytes"] / report["cache_bytes_per_token"]
        fitting += tokens / 131_072 <= 64 and 2 * report["weight_bytes"] <= 640e9
        figures[f"tokens together, {shape}"] = tokens
    return {"fitting_share": fitting / len(shapes), **figures}
