"""Figures of `window_span.yaml`: sliding windows, and the use of the middle of a context."""

from __future__ import annotations

from workbench.experiment.verdict import VariantRows, variant_row

FULL = "float32"
WINDOWS = {"window 512": 512, "window 256": 256, "window 128": 128, "window 64": 64}
PAGE = 16


def window_bounds(rows: VariantRows) -> dict[str, float]:
    """Return whether a sequence's pages hold at most the window and two pages more, and the largest share of the full
    model's gain that is left on names assigned before the window, with its distance in tokens."""
    full = variant_row(rows, FULL)
    limits = {name: (span + 2 * PAGE) * full["stored_bytes_per_token"] for name, span in WINDOWS.items()}
    shares = []
    for name, span in WINDOWS.items():
        for depth, found in variant_row(rows, name)["copying"].items():
            exact = full["copying"][depth]
            if found["distance"] > span and exact["gain"] > 1.0:
                shares.append((found["gain"] / exact["gain"], found["distance"]))
    most, distance = max(shares)
    bounded = all(variant_row(rows, name)["kv_bytes"] <= limit for name, limit in limits.items())
    return {"bounded": bounded, "gain_left_before_window": most, "distance": distance}


def middle(rows: VariantRows) -> dict[str, float]:
    """Return how far the least used inner depth lies below both ends, as a share of the better one's gain of a name,
    and the gain in nats by the depth of its assignment. Whether more context is better is not asked."""
    gains = {float(depth): found["gain"] for depth, found in variant_row(rows, FULL)["copying"].items()}
    depths = sorted(gains)
    first, last, inner = gains[depths[0]], gains[depths[-1]], min(gains[depth] for depth in depths[1:-1])
    by_depth = {f"gain at {depth:.0%}": gains[depth] for depth in depths}
    return {"dip": (min(first, last) - inner) / max(first, last), **by_depth}
