"""Figures of claims on passes through the model: a prompt in one pass, one token a pass, and unchanged weights."""

from __future__ import annotations

import hashlib
from statistics import median
from typing import Any

from experiments.claims.tokens import CODE


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


def one_pass() -> dict[str, float]:
    """Return the steps of a prompt's prefill, the tokens cached after it, and the next tokens.

    The next tokens are compared with the naive oracle, which computes the whole text for each.
    """
    from workbench.engine.runner import generate
    from workbench.oracle import naive

    runner = _demo()
    request = _request(runner, 8)
    prefill = [step for step in _steps(runner, request) if step.phase == "prefill"]
    tokens = generate(runner, [request])["one"].token_ids
    cached = max(step.kv_bytes for step in prefill) / runner.store.bytes_per_token
    return {
        "prompt_tokens": len(request.prompt_ids),
        "steps": len(prefill),
        "cached_tokens": cached,
        "all_cached": cached >= len(request.prompt_ids),
        "same_tokens": list(tokens) == naive.greedy(runner.model, list(request.prompt_ids), 8),
    }


def dependent() -> dict[str, float]:
    """Return the passes for each of 64 tokens of a repetitive text, without and with drafts, and whether both outputs
    are equal."""
    from workbench.engine.runner import generate
    from workbench.request import Request, SamplingParameters

    found: dict[str, int] = {}
    texts = set()
    for name, settings in (("plain", {}), ("drafted", {"speculate": "prompt_lookup"})):
        runner = _demo(**settings)
        ids = tuple(runner.tokenizer.encode(CODE + CODE[: len(CODE) // 2]))
        request = Request("one", ids, SamplingParameters(temperature=0, max_tokens=64, ignore_eos=True))
        steps = _steps(runner, request)
        found[name] = sum(step.phase != "prefill" for step in steps) + 1  # the prefill gives the first token
        texts.add(tuple(generate(runner, [request])["one"].token_ids))
    return {
        "passes_per_token": found["plain"] / 64,
        "passes_per_token_with_drafts": found["drafted"] / 64,
        "same_output": len(texts) == 1,
    }


def unchanged() -> dict[str, float]:
    """Return whether all weights have after prefill and decode the fingerprint that they had before, and the steps."""
    runner = _demo()

    def fingerprint() -> str:
        found = hashlib.sha256()
        for tensor in (*runner.model.parameters(), *runner.model.buffers()):
            found.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
        return found.hexdigest()

    before = fingerprint()
    steps = _steps(runner, _request(runner, 32))
    return {"steps": len(steps), "same_bits": fingerprint() == before}


def latency_identity(quick: bool, model: str = "demo") -> dict[str, float]:
    """Return the relative error of TTFT + tokens / rate for one answer of the model, as a share of its E2EL.

    The rate is taken after the first token (B), over the whole time (E), and by TPOT's own count.
    """
    from workbench.engine.load import load
    from workbench.trace.events import Decoded

    runner = load(model, pages=32)
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
