"""Verdicts on grouped heads and the formula of the cache: the rules of `kv_groups.yaml`, written before the run."""

from __future__ import annotations

from workbench.model.shapes import named_shape
from workbench.study.cache_of import store_of
from workbench.study.capacity import page_bytes
from workbench.study.experiment import CachePart
from workbench.study.memory_report import of_name
from workbench.study.verdict import Rows, Verdict, row_of

GROUPS = {"4 groups": 4, "2 groups": 2, "1 group, mean": 1}
LLAMA = "llama-3-70b"
SAME = 0.02  # relative


def judge(rows: Rows) -> list[Verdict]:
    return [saving(rows), formula(rows), llama()]


def saving(rows: Rows) -> Verdict:
    sizes = {groups: row_of(rows, name)["bytes_per_token"] for name, groups in GROUPS.items()}
    right = all(abs(size / sizes[1] / groups - 1) <= SAME for groups, size in sizes.items())
    shape = named_shape(LLAMA).layers[0].attention
    ratio = shape.heads / shape.groups
    lost = row_of(rows, "1 group, mean")["kl_mean"]
    return Verdict(
        claim="kv-gqa",
        says="8 KV heads for 64 query heads shrink the cache 8 times",
        rule=f"measured bytes a token go with the number of key/value heads within {SAME:.0%}, and 64 / 8 is 8",
        outcome="holds" if right and ratio == 8 else "refuted",
        because=(
            f"{', '.join(f'{groups}: {size:,.0f}' for groups, size in sizes.items())} bytes a token; {LLAMA} has {ratio:g} "
            f"query heads a key/value head. Pooling a trained model's heads without training it again costs KL {lost:.2g}"
        ),
    )


def formula(rows: Rows) -> Verdict:
    """2 x layers x groups x dim x bytes, for the measured model: 6 layers, heads of 64, float32."""
    off = {}
    for name, groups in GROUPS.items():
        off[name] = row_of(rows, name)["stored_bytes_per_token"] / (2 * 6 * groups * 64 * 4) - 1
    worst = max(off.values(), key=abs)
    return Verdict(
        claim="kv-formula",
        says="bytes = 2 x layers x kv_heads x head_dim x tokens x bytes per value",
        rule="bytes of the allocated pages a token are the formula's exactly",
        outcome="holds" if worst == 0 else "refuted",
        because=f"largest deviation {worst:.2%} over {', '.join(off)}",
    )


def llama() -> Verdict:
    """Both the formula and a cache laid out on torch's meta device: the same tensors, without their memory."""
    told = of_name(f"shape:{LLAMA}", context=128_000, dtype="float16")
    store = store_of(named_shape(LLAMA), CachePart(), "float16")
    laid_out = sum(page_bytes(store)) / store.page_size * 128_000
    size, weights = told["cache_bytes"] / 1e9, told["weight_bytes"] / 1e9
    right = told["cache_bytes_per_token"] == 327_680 and laid_out == told["cache_bytes"]
    return Verdict(
        claim="kv-llama70b",
        says="Llama 3 70B in FP16: 327,680 bytes a token; about 40 GB (A) or 30 GB (E) at 128K tokens; weights about 140 GB",
        rule="exact count; a source's figure stands within 10%: both hold, one of them: with limits, none: refuted",
        outcome="refuted"
        if not right
        else "holds-with-limits"
        if abs(size / 40 - 1) <= 0.1 < abs(size / 30 - 1)
        else "holds",
        because=f"{told['cache_bytes_per_token']:,} bytes a token, {size:.1f} GB (A is right, E is not), weights {weights:.1f} GB",
    )
