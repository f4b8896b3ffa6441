"""Run llama.cpp for experiments/expert_products.py: `PYTHON expert_products_llama.py MODEL.gguf THREADS MAX_TOKENS`.

PYTHON has llama-cpp-python and numpy. The peers' engine answers one job per line: with the median seconds of decoded
tokens, the seconds of a prompt (`output_tokens` 1), or its logits (`output_tokens` 0)."""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "peers" / "scripts"))
from run_llama_cpp import LlamaCpp  # noqa: E402 (a script of another interpreter's, which imports its neighbours)


def answer(engine: LlamaCpp, job: dict[str, Any]) -> dict[str, Any]:
    if not job["output_tokens"]:
        return {"logits": engine.logits(job["prompt"])["prefill"]}
    began = time.perf_counter()
    (times,) = engine.generate([job])
    return {"seconds": statistics.median([after - before for before, after in pairwise(times)] or [times[0] - began])}


if __name__ == "__main__":
    model, threads, most = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    longest = [[{"prompt": [], "output_tokens": most}]]
    job = {"model": model, "threads": threads, "format": "bfloat16", "kind": "decode", "repetitions": longest}
    peer = LlamaCpp(job)
    print(json.dumps({"version": peer.llama.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(peer, json.loads(line))), flush=True)
