"""Claims on passes through the model: a prompt in one pass, one token a pass, and unchanged weights."""

from __future__ import annotations

import hashlib
from statistics import median
from typing import Any

from experiments.claims.tokens import CODE, ENGINE
from workbench.claims.claim import (
    CalculationEvidence,
    Claim,
    ClaimSource,
    ClaimTrial,
    EvidenceNumbers,
    MeasurementEvidence,
    Ruling,
)


def _demo(**settings: Any) -> Any:
    from workbench.engine.load import load

    return load("demo", dtype="float32", backend="eager", pages=32, **settings)


def _request(runner: Any, tokens: int, prompt: int | None = None) -> Any:
    from workbench.request import Request, SamplingParameters

    ids = tuple(runner.tokenizer.encode(CODE))[:prompt]
    return Request("one", ids, SamplingParameters(temperature=0, max_tokens=tokens, ignore_eos=True))


def _steps(runner: Any, request: Any) -> list[Any]:
    from workbench.trace.events import Stepped

    return [event for event in runner.stream([request]) if isinstance(event, Stepped)]


def one_pass() -> EvidenceNumbers:
    """Return the steps of a prompt's prefill, the tokens cached after it, and the next tokens.

    The next tokens are compared with the naive oracle, which computes the whole text for each.
    """
    from workbench.engine.runner import generate
    from workbench.oracle import naive

    runner = _demo()
    request = _request(runner, 8)
    prefill = [step for step in _steps(runner, request) if step.phase == "prefill"]
    tokens = generate(runner, [request])["one"].token_ids
    return {
        "prompt": len(request.prompt_ids),
        "steps": len(prefill),
        "cached_tokens": max(step.kv_bytes for step in prefill) / runner.store.bytes_per_token,
        "same_tokens": list(tokens) == naive.greedy(runner.model, list(request.prompt_ids), 8),
    }


def parallel(found: EvidenceNumbers) -> Ruling:
    """One step computes the prompt, places for all its tokens are held in the cache after it, and what follows is what
    computing the whole text each time gives: holds; else refuted."""
    right = found["steps"] == 1 and found["cached_tokens"] >= found["prompt"] and found["same_tokens"]
    return Ruling(
        "holds" if right else "refuted",
        f"{found['prompt']} tokens in {found['steps']} step; the cache has pages for {found['cached_tokens']:.0f} "
        f"tokens after it; the next 8 are {'' if found['same_tokens'] else 'not '}those of the naive loop",
        figures={"steps of the prefill": found["steps"]},
    )


def dependent() -> EvidenceNumbers:
    """Return the decode steps for 64 tokens of a repetitive text, without and with drafts.

    `same` says whether both outputs are equal.
    """
    from workbench.engine.runner import generate
    from workbench.request import Request, SamplingParameters

    found: dict[str, Any] = {}
    texts = set()
    for name, settings in (("plain", {}), ("drafted", {"speculate": "prompt_lookup"})):
        runner = _demo(**settings)
        ids = tuple(runner.tokenizer.encode(CODE + CODE[: len(CODE) // 2]))
        request = Request("one", ids, SamplingParameters(temperature=0, max_tokens=64, ignore_eos=True))
        steps = _steps(runner, request)
        found[name] = sum(step.phase != "prefill" for step in steps) + 1  # the prefill gives the first token
        texts.add(tuple(generate(runner, [request])["one"].token_ids))
    return found | {"tokens": 64, "same": len(texts) == 1}


def sequential(found: EvidenceNumbers) -> Ruling:
    """As many passes as tokens, whatever is proposed: holds; fewer where drafts are checked that turn out right: with
    limits; fewer without drafts: refuted."""
    plain, drafted, tokens = found["plain"], found["drafted"], found["tokens"]
    return Ruling(
        "refuted" if plain < tokens else "holds" if drafted >= tokens else "holds-with-limits",
        f"{tokens} tokens in {plain} passes; in {drafted} where tokens found in the text are checked besides, with "
        f"{'the same' if found['same'] else 'another'} output",
        "unless tokens are guessed beforehand and checked together: speculation needs fewer passes for the same text",
        {"passes for 64 tokens": plain, "passes with drafts": drafted},
    )


def unchanged() -> EvidenceNumbers:
    """Return fingerprints of all weights before and after prefill and decode."""
    runner = _demo()

    def fingerprint() -> str:
        found = hashlib.sha256()
        for tensor in (*runner.model.parameters(), *runner.model.buffers()):
            found.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
        return found.hexdigest()

    before = fingerprint()
    steps = _steps(runner, _request(runner, 32))
    return {"steps": len(steps), "same": fingerprint() == before}


def frozen(found: EvidenceNumbers) -> Ruling:
    """Every bit of the weights is after a generation what it was before: holds; else refuted."""
    return Ruling(
        "holds" if found["same"] else "refuted",
        f"after {found['steps']} steps the weights' SHA-256 is {'the same' if found['same'] else 'another'}",
    )


def identity(quick: bool) -> EvidenceNumbers:
    """Return the relative error of TTFT + tokens / rate for one answer of the demo, as a share of its E2EL.

    The rate is taken after the first token (B), over the whole time (E), and by TPOT's own count.
    """
    from workbench.engine.load import load
    from workbench.trace.events import Decoded

    runner = load("demo", pages=32)
    off: dict[str, list[float]] = {"B": [], "E": [], "TPOT": []}
    tokens = 200
    for turn in range(3 if quick else 9):
        began = runner.clock()
        times = [e.time for e in runner.stream([_request(runner, tokens)]) if isinstance(e, Decoded)]
        first, whole = times[0] - began, times[-1] - began
        after = (tokens - 1) / (whole - first)
        if turn:
            off["B"].append((first + tokens / after) / whole - 1)
            off["E"].append((first + tokens / (tokens / whole)) / whole - 1)
            off["TPOT"].append((first + (tokens - 1) / after) / whole - 1)
    return {"tokens": tokens, **{name: median(values) for name, values in off.items()}}


def off_by_one(found: EvidenceNumbers) -> Ruling:
    """Both sources' readings within 0.1% of the time measured: holds; one of them within 1%: with limits; else
    refuted."""
    errors = {name: abs(found[name]) for name in ("B", "E")}
    near = [name for name, error in errors.items() if error <= 0.01]
    return Ruling(
        "holds" if max(errors.values()) <= 0.001 else "holds-with-limits" if near else "refuted",
        f"{found['tokens']} tokens: with the rate after the first token {found['B']:+.2%}, one token too many; "
        "with the rate "
        f"over the whole time {found['E']:+.2%}, the TTFT counted twice; with one token less, as TPOT counts, "
        f"{found['TPOT']:+.2%}",
        f"read as {' and '.join(near)} has it, one token of {found['tokens']} off; exact with one token less",
        {f"off by, read as {name}": found[name] for name in ("B", "E", "TPOT")},
    )


CLAIMS = (
    Claim(
        id="prefill-parallel",
        says="All prompt tokens go through in one pass, which gives the last position's logits and the whole KV cache",
        sources=(ClaimSource("A to E", "one pass"),),
        trials=(
            ClaimTrial(
                CalculationEvidence(one_pass, ENGINE),
                parallel,
                examples={
                    "holds": {"prompt": 101, "steps": 1, "cached_tokens": 128, "same_tokens": True},
                    "refuted": {"prompt": 101, "steps": 101, "cached_tokens": 128, "same_tokens": True},
                },
                impossible={"holds-with-limits": "one step does all of it, or it does not"},
            ),
        ),
    ),
    Claim(
        id="decode-sequential",
        says="N output tokens take N dependent passes; no two can run at once",
        sources=(ClaimSource("A to E", "N tokens, N passes"),),
        trials=(
            ClaimTrial(
                CalculationEvidence(dependent, ENGINE),
                sequential,
                examples={
                    "holds": {"plain": 64, "drafted": 64, "tokens": 64, "same": True},
                    "holds-with-limits": {"plain": 64, "drafted": 30, "tokens": 64, "same": True},
                    "refuted": {"plain": 32, "drafted": 32, "tokens": 64, "same": True},
                },
            ),
        ),
    ),
    Claim(
        id="weights-frozen",
        says="Nothing about the weights changes during inference",
        sources=(ClaimSource("C", "nothing"), ClaimSource("D", "nothing")),
        trials=(
            ClaimTrial(
                CalculationEvidence(unchanged, ENGINE),
                frozen,
                examples={"holds": {"steps": 33, "same": True}, "refuted": {"steps": 33, "same": False}},
                impossible={"holds-with-limits": "every bit is as it was, or some bit is not"},
            ),
        ),
    ),
    Claim(
        id="latency-identity",
        says="Total latency is TTFT + output tokens / tokens per second",
        sources=(
            ClaimSource("B", "tokens per second after the first token"),
            ClaimSource("E", "tokens per second of all"),
        ),
        trials=(
            ClaimTrial(
                MeasurementEvidence("latency_identity", identity),
                off_by_one,
                examples={
                    "holds": {"tokens": 2000, "B": 0.0005, "E": 0.0008, "TPOT": 0.0},
                    "holds-with-limits": {"tokens": 200, "B": 0.005, "E": 0.05, "TPOT": 0.0},
                    "refuted": {"tokens": 5, "B": 0.2, "E": 0.2, "TPOT": 0.0},
                },
            ),
        ),
    ),
)
