"""Judge sliding windows, and the use of the middle of a context, by the rules of `window_span.yaml`.

The rule on the middle was changed after the run (`CHANGED`).
"""

from __future__ import annotations

from workbench.experiment.verdict import RuleChange, VariantRows, Verdict, variant_row

FULL, NARROW = "float32", "window 64"
WINDOWS = {"window 512": 512, "window 256": 256, "window 128": 128, "window 64": 64}
PAGE = 16
BLIND = 0.1  # of the full model's gain: below it a window sees nothing of a name
FALL, SOME = 0.1, 0.02  # of the better end's gain: the middle must lie so much below both ends
CHANGED = (
    RuleChange(
        what=(
            "a middle that lies below one end only is refuted; before, it held with limits ('nearer is better, "
            "without a dip: the beginning is used least, not the middle')"
        ),
        when="2026-11-22",
        after="window_span-20261121-135154.json",
        why="those limits said the opposite of the claim; what grows towards the end is not lost in the middle",
    ),
)


def judge(rows: VariantRows) -> list[Verdict]:
    return [window_bounds(rows), middle(rows)]


def window_bounds(rows: VariantRows) -> Verdict:
    """Judge a window's memory (its pages, whatever the text's length) and its reach (names before the window, against
    the full model).
    """
    full = variant_row(rows, FULL)
    per_token = full["stored_bytes_per_token"]
    bounded = all(
        variant_row(rows, name)["kv_bytes"] <= (span + 2 * PAGE) * per_token for name, span in WINDOWS.items()
    )
    shares = []
    for name, span in WINDOWS.items():
        for depth, found in variant_row(rows, name)["copying"].items():
            exact = full["copying"][depth]
            if found["distance"] > span and exact["gain"] > 1.0:
                shares.append((found["gain"] / exact["gain"], name, found["distance"]))
    most, where, distance = max(shares)
    outcome = "refuted" if not bounded else "holds" if most <= BLIND else "holds-with-limits"
    return Verdict(
        claim="kv-window",
        says="A sliding window bounds the cache to the last N tokens, at the price of seeing nothing before them",
        rule=(
            "a sequence's pages hold at most the window and two pages more: else refuted; holds where names assigned "
            f"before the window gain at most {BLIND:.0%} of what they gain without a window, with limits where more"
        ),
        outcome=outcome,
        reason=(
            f"bounded: {'yes' if bounded else 'no'}; of names before the window at best {most:.0%} of the gain is left "
            f"({where}, {distance:.0f} tokens back)"
        ),
        limits=f"layer over layer sees past the window: {most:.0%} of the gain is left {distance:.0f} tokens back",
        figures={"of the gain on names before the window, at best": most},
    )


def middle(rows: VariantRows) -> Verdict:
    """Judge whether the middle of the context is used less than both of its ends."""
    gains = {float(depth): found["gain"] for depth, found in variant_row(rows, FULL)["copying"].items()}
    depths = sorted(gains)
    first, last, inner = gains[depths[0]], gains[depths[-1]], min(gains[depth] for depth in depths[1:-1])
    dip = (min(first, last) - inner) / max(first, last)
    gains_by_depth = ", ".join(f"{depth:.0%} {gains[depth]:.2f}" for depth in depths)
    return Verdict(
        claim="lost-in-the-middle",
        says="More context is not better: what stands in the middle is used less",
        rule=(
            f"gain of a name by the depth of its assignment: some inner depth lies below both ends by at least "
            f"{FALL:.0%} of the better one: holds; by at least {SOME:.0%}: with limits; else (nearer is better, or "
            "all are alike): refuted. Whether more context is better is not asked"
        ),
        outcome="holds" if dip >= FALL else "holds-with-limits" if dip >= SOME else "refuted",
        reason=(
            f"nats a token from depth {gains_by_depth}; the least of the inner ones is {inner:.2f}, the lesser end "
            f"{min(first, last):.2f}"
        ),
        limits=f"a dip of {dip:.0%} only",
        figures={f"nats gained at depth {depth:.0%}": gains[depth] for depth in depths},
        changed=CHANGED,
    )
