"""Claims on the KV cache in numbers: its size, what fits beside the weights, and its savings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import kv_groups
from workbench.claims.claim import (
    CalculationEvidence,
    Claim,
    ClaimSource,
    ClaimTrial,
    EvidenceNumbers,
    ImpossibleOutcomes,
    Ruling,
    RunEvidence,
)
from workbench.display import Table
from workbench.memory.report import report_for
from workbench.model.cost import visible_pairs

LLAMA = "shape:llama-3.1-70b"
FULL = 128_000  # tokens; the sources write 128K
CARD = 80e9


def _llama(context: int = FULL, **settings: Any) -> EvidenceNumbers:
    return report_for(LLAMA, context=context, dtype="float16", **settings)


def _groups(*sizes: float) -> EvidenceNumbers:
    rows = zip(kv_groups.GROUPS, sizes, strict=True)
    return [{"variant": n, "bytes_per_token": s, "stored_bytes_per_token": s, "kl_mean": 0.1} for n, s in rows]


GROUPED, WASTEFUL = _groups(12288.0, 6144.0, 3072.0), _groups(12288.0, 12288.0, 12288.0)


def figures_of_128k(records: object) -> Sequence[Table]:
    """Tabulate the 30 and the 40 GB: the number of tokens and the unit in which each is right."""
    rows = []
    for label, tokens in (("128,000", FULL), ("131,072 (128 Ki)", 1 << 17), ("100,000", 100_000), ("91,552", 91_552)):
        size = _llama(tokens)["cache_bytes"]
        rows.append((label, f"{size / 1e9:.2f}", f"{size / 2**30:.2f}"))
    reach = int(30e9 // _llama()["cache_bytes_per_token"])
    title = f"Llama 3 70B in FP16: cache of one text; 30 GB are full at {reach:,} tokens"
    half = f"{_llama(cache='int8')['cache_bytes'] / 1e9:.2f}"
    return [Table(title, [*rows, ("128,000, INT8", half, "")], ("tokens", "GB", "GiB"))]


def sessions(shape: str = LLAMA, context: int = FULL) -> EvidenceNumbers:
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


def two_sessions(found: EvidenceNumbers) -> Ruling:
    """Weights and two caches of 128,000 tokens lie in 80 GB in FP16: holds; with INT4 weights: with limits; else
    refuted."""
    fits = found["sessions"] >= 2
    some = found["sessions_int4"] >= 2
    return Ruling(
        "holds" if fits else "holds-with-limits" if some else "refuted",
        f"weights {found['weights_gb']:.1f} GB and {found['session_gb']:.1f} GB a request: {found['sessions']} fit; "
        f"were there no weights, {found['sessions_without_weights']}; with INT4 weights {found['sessions_int4']}, with "
        f"weights and cache in INT4 {found['sessions_int4_both']}",
        "with weights in INT4",
        {"requests beside the weights": found["sessions"], "requests, weights forgotten":
         found["sessions_without_weights"]},
    )  # fmt: skip


def cards(records: object) -> Sequence[Table]:
    formats = (("FP16, FP16", "dense", "dense"), ("INT8, INT8", "int8", "int8"), ("INT4, INT4", "int4", "int4"))
    rows = []
    for card, size in (("H100", 80), ("H200", 141)):
        for count in (1, 2, 3, 4, 8):
            fit = [_llama(memory=f"{count * size}GB", weights=w, cache=c)["sequences"] for _, w, c in formats]
            rows.append((f"{count} x {card}", *map(str, fit)))
    names = tuple(f"{name} (weights, cache)" for name, *_ in formats)
    return [Table("Llama 3.1 70B: requests of 128,000 tokens beside the weights", rows, ("cards", *names))]


def growth(tokens: int = 32_768, scores: bool = False) -> EvidenceNumbers:
    """Return the growth of cache bytes and query-key pairs when tokens double.

    With `scores`, attention also stores one layer's scores (float32) of the whole text.
    """

    def size(n: int) -> float:
        return _llama(n)["cache_bytes"] + (64 * n * n * 4 if scores else 0)

    return {
        "cache_times": size(2 * tokens) / size(tokens),
        "pairs_times": visible_pairs(0, 2 * tokens, None)[0] / visible_pairs(0, tokens, None)[0],
    }


def quadratic(found: EvidenceNumbers) -> Ruling:
    """Twice the tokens take at least 3.5 times the bytes: holds; at most 2.5 times: refuted; between: with limits."""
    times = found["cache_times"]
    return Ruling(
        "holds" if times >= 3.5 else "refuted" if times <= 2.5 else "holds-with-limits",
        f"twice the tokens take {times:.2f} times the bytes; what grows {found['pairs_times']:.2f} times is the "
        "arithmetic of a whole text, and memory only where all scores are written down at once",
        "neither linear nor quadratic",
        {"times the bytes at twice the tokens": times, "times the query-key pairs": found["pairs_times"]},
    )


def outgrowing(*shapes: str) -> EvidenceNumbers:
    """Return the tokens of all requests together from which the cache is larger than the weights, and the size of both
    then.
    """
    found = {}
    for shape in shapes or ("llama-3.1-8b", "llama-3.1-70b"):
        report = report_for(f"shape:{shape}", dtype="float16")
        tokens = report["weight_bytes"] / report["cache_bytes_per_token"]
        found[shape] = {"tokens": tokens, "full_texts": tokens / 131_072, "both_gb": 2 * report["weight_bytes"] / 1e9}
    return found


def exceeds(found: EvidenceNumbers) -> Ruling:
    """At most 64 texts as long as the model takes outgrow its weights, and both fit into eight cards of 80 GB: holds
    for all models; for some: with limits; else refuted."""
    so = [name for name, one in found.items() if one["full_texts"] <= 64 and one["both_gb"] <= 640]
    return Ruling(
        "holds" if len(so) == len(found) else "holds-with-limits" if so else "refuted",
        "; ".join(f"{n}: from {one['tokens']:,.0f} tokens together, {one['full_texts']:.1f} texts of 131,072, when "
                  f"weights and cache take {one['both_gb']:.0f} GB" for n, one in found.items()),
        f"for {', '.join(so)}",
        {f"tokens together, {name}": one["tokens"] for name, one in found.items()},
    )  # fmt: skip


EXACT: ImpossibleOutcomes = {"holds-with-limits": "an exact count is right or it is not"}

CLAIMS = (
    Claim(
        id="kv-formula",
        says="bytes = 2 x layers x kv_heads x head_dim x tokens x bytes per value",
        sources=(ClaimSource("A", "the formula"), ClaimSource("E", "the formula, as a function")),
        trials=(
            ClaimTrial(RunEvidence("kv_groups"), kv_groups.formula, {"holds": GROUPED, "refuted": WASTEFUL}, EXACT),
        ),
    ),
    Claim(
        id="kv-llama70b",
        says="Llama 3 70B in FP16: 327,680 bytes a token; at 128K tokens about 40 GB (A) or 30 GB (E); weights 140 GB",
        sources=(
            ClaimSource("A", "327,680 bytes a token, about 40 GB at 128K tokens, weights about 140 GB"),
            ClaimSource("E", "about 30 GB at 128K tokens; its own function gives 39.06 GiB"),
        ),
        trials=(
            ClaimTrial(
                CalculationEvidence(kv_groups.llama_sizes),
                kv_groups.llama,
                examples={
                    "holds-with-limits": kv_groups.llama_sizes,
                    "refuted": lambda: kv_groups.llama_sizes(8192),
                },
                impossible={"holds": "40 and 30 GB are further apart than 10% each: no count makes both right"},
            ),
        ),
        condition_tables=figures_of_128k,
    ),
    Claim(
        id="kv-two-sessions",
        says="One 80 GB card has room for two requests of 128K tokens on Llama 3 70B",
        sources=(ClaimSource("A", "80 GB / 40 GB = 2; the 140 GB of weights are forgotten"),),
        trials=(
            ClaimTrial(
                CalculationEvidence(sessions),
                two_sessions,
                examples={
                    "holds": lambda: sessions("shape:llama-3.1-8b"),
                    "holds-with-limits": lambda: sessions(context=32_000),
                    "refuted": sessions,
                },
            ),
        ),
        condition_tables=cards,
    ),
    Claim(
        id="kv-gqa",
        says="8 KV heads for 64 query heads shrink the cache 8 times",
        sources=(ClaimSource("A", "8 times"),),
        trials=(
            ClaimTrial(RunEvidence("kv_groups"), kv_groups.saving, {"holds": GROUPED, "refuted": WASTEFUL}, EXACT),
        ),
    ),
    Claim(
        id="kv-memory-quadratic",
        says="attention's memory in the KV cache is O(n^2)",
        sources=(ClaimSource("C", "O(n^2)"),),
        trials=(
            ClaimTrial(
                CalculationEvidence(growth),
                quadratic,
                examples={
                    "holds": lambda: growth(scores=True),
                    "holds-with-limits": lambda: growth(1024, scores=True),
                    "refuted": growth,
                },
            ),
        ),
    ),
    Claim(
        id="kv-exceeds-weights",
        says="With long context and batch the cache outgrows the weights",
        sources=(ClaimSource("C", "without figures"),),
        trials=(
            ClaimTrial(
                CalculationEvidence(outgrowing),
                exceeds,
                examples={
                    "holds": outgrowing,
                    "holds-with-limits": lambda: outgrowing("llama-3.1-8b", "gpt-3-175b"),
                    "refuted": lambda: outgrowing("gpt-3-175b"),
                },
            ),
        ),
    ),
)
