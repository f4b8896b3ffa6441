"""Claims on smaller caches: quantization, windows, pages."""

from __future__ import annotations

from experiments import kv_precision, paging_waste, window_span
from workbench.claims.claim import (
    Claim,
    ClaimSource,
    ClaimTrial,
    EvidenceNumbers,
    JudgeRule,
    OutcomeExamples,
    RunEvidence,
)


def _formats(int8: float, int4: float, lost: float, sequences: tuple[int, int, int]) -> EvidenceNumbers:
    """Return rows of formats with these shares of bfloat16's bytes and losses in nats a token."""
    rows = [
        ("bfloat16", 1.0, 0.0, sequences[0]),
        ("int8", int8, lost, sequences[1]),
        ("int4", int4, lost, sequences[2]),
    ]
    names = ("variant", "stored_bytes_per_token", "kl_mean", "sequences")
    more = {"kv_tokens": 1000, "sequence_tokens": 4096}
    return [dict(zip(names, row, strict=True)) | {"bytes_per_token": row[1]} | more for row in rows]


GOOD, USELESS = _formats(0.53, 0.28, 1e-4, (10, 19, 36)), _formats(0.9, 0.8, 0.5, (10, 11, 12))
SOME = [row | {"bytes_per_token": 1.0} for row in _formats(0.53, 0.28, 1e-4, (10, 18, 20))]  # a long residual
QUANTIZED: OutcomeExamples = {"holds": GOOD, "holds-with-limits": SOME, "refuted": USELESS}


def _windows(pages: float, gain: float = 0.0) -> EvidenceNumbers:
    """Return rows of windows that hold `pages` times their tokens, with this gain on names (the full model: 5)."""
    seen = {"gain": 5.0, "distance": 600.0}
    rows = [{"variant": window_span.FULL, "stored_bytes_per_token": 1.0, "copying": {"0.0": seen}}]
    blind = {"0.0": {"gain": gain, "distance": 600.0}}
    windows = window_span.WINDOWS.items()
    return rows + [{"variant": name, "kv_bytes": pages * span, "copying": blind} for name, span in windows]


def _pages(waste: float, sequences: float) -> EvidenceNumbers:
    reserved = {"variant": "the longest text reserved", "cache_waste": 0.9, "sequences_mean": 10.0}
    paged = {"variant": "pages of 16", "cache_waste": waste, "sequences_mean": sequences}
    return [row | {"output_tokens_per_s": 1.0} for row in (reserved, paged)]


CLAIMS = (
    Claim(
        id="kv-quant-size",
        says="INT8 halves and INT4 quarters the cache, with minimal loss of quality",
        sources=(ClaimSource("A", "a half and a quarter; minimal loss"),),
        trials=(ClaimTrial(RunEvidence("kv_precision"), kv_precision.size_and_quality, QUANTIZED),),
    ),
    Claim(
        id="kv-quant-concurrency",
        says="Halving the precision roughly doubles the concurrent sessions",
        sources=(ClaimSource("A", "about twice"),),
        trials=(ClaimTrial(RunEvidence("kv_precision"), kv_precision.concurrency, QUANTIZED),),
    ),
    Claim(
        id="kv-window",
        says="A sliding window bounds the cache to the last N tokens, at the price of seeing nothing before them",
        sources=(ClaimSource("A", "N tokens"), ClaimSource("C", "N tokens")),
        trials=(
            ClaimTrial(
                RunEvidence("window_span"), window_span.window_bounds,
                {"holds": _windows(1.0), "holds-with-limits": _windows(1.0, 2.0), "refuted": _windows(3.0)},
            ),
        ),
    ),
    Claim(
        id="kv-paged",
        says="Fixed-size pages behind a page table end fragmentation and pack more requests into the same memory",
        sources=(ClaimSource("C", "without figures"), ClaimSource("D", "without figures"),
                 ClaimSource("vLLM, Kwon et al., 2023", "under 4% of the cache wasted")),
        trials=(
            ClaimTrial(
                RunEvidence("paging_waste"), JudgeRule(paging_waste.judge, "kv-paged"),
                {"holds": _pages(0.01, 90.0), "holds-with-limits": _pages(0.1, 90.0), "refuted": _pages(0.5, 11.0)},
            ),
        ),
    ),
)  # fmt: skip
