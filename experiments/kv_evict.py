"""Figures of `kv_evict.yaml`: what eviction policies keep.

All policies evict at the same positions of a text and hold the same number of tokens. Texts are computed as in serving:
spans end where tokens are evicted. SnapKV evicts once, at the end of the prompt: only decoded tokens are computed on
its selection, so its bits a byte are listed but not ranked. Names are to be copied after its eviction, but for their
first token.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.experiment.verdict import VariantRows, variant_row

FULL, PAGE = "float32", 16
BUDGETS = (64, 192)
ALWAYS = ("window", "sinks + recent", "heavy hitters")  # these hold their budget at all times


def bounded(rows: VariantRows) -> dict[str, float]:
    """Return how many policies and budgets hold more bytes at the end of a text than their budget; SnapKV may hold a
    page more for the generated tokens. Also the length of the text."""
    full, over = variant_row(rows, FULL), 0
    for budget in BUDGETS:
        for policy in (*ALWAYS, "SnapKV"):
            more = 0 if policy in ALWAYS else PAGE
            held = variant_row(rows, f"{policy} {budget}")["kv_bytes"]
            over += held > (budget + more) * full["stored_bytes_per_token"]
    return {"over_budget": over, "tokens": full["kv_tokens"]}


def better(rows: VariantRows, policy: str, others: Sequence[str]) -> dict[str, float]:
    """Return, for each budget, the policy's bits a byte over the best of the others; and over those of all tokens."""
    full, figures = variant_row(rows, FULL)["bits_per_byte"], {}
    for budget in BUDGETS:
        bits = variant_row(rows, f"{policy} {budget}")["bits_per_byte"]
        best = min(variant_row(rows, f"{other} {budget}")["bits_per_byte"] for other in others)
        figures |= {f"bits_ratio_{budget}": bits / best, f"bits_ratio_to_all_tokens_{budget}": bits / full}
    return figures


def snapkv(rows: VariantRows) -> dict[str, float]:
    """Return, for each budget, the share of the full cache's gain that SnapKV leaves on names farther back than a cache
    of only the newest tokens reaches, at every depth where the full model can copy."""
    full, figures = variant_row(rows, FULL)["copying"], {}
    for budget in BUDGETS:
        found = variant_row(rows, f"SnapKV {budget}")["copying"]
        far = [depth for depth, one in found.items() if one["distance"] > budget and full[depth]["gain"] > 1.0]
        shares = [found[depth]["gain"] / full[depth]["gain"] for depth in far]
        figures[f"gain_left_{budget}"] = sum(shares) / len(shares) if shares else 0.0
    return figures
