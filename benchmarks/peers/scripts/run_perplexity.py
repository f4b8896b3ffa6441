"""Compute llama.cpp's log-probability of each token of a text with the package xllamacpp: reads {model, ids, threads},
prints a list."""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys

FORCED = 1000.0  # a bias; log-probabilities are of the logits before it


def log_probabilities(model: str, ids: list[int], threads: int) -> list[float]:
    """Return the log-probability of every token but the first. Each comes from a separate request on the same slot."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.n_gpu_layers = len(ids) + 64, 1, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = threads
    server = xllamacpp.Server(params)
    found = []
    for place in range(1, len(ids)):
        body = {"prompt": ids[:place], "max_tokens": 1, "logprobs": 1, "logit_bias": {str(ids[place]): FORCED},
                "temperature": 0, "cache_prompt": True}  # fmt: skip
        (token,) = server.handle_completions(body)["choices"][0]["logprobs"]["content"]
        if token["id"] != ids[place]:
            raise RuntimeError(f"token {place} is {ids[place]}, llama.cpp gave {token['id']}")
        found.append(token["logprob"])
    return found


if __name__ == "__main__":
    json.dump(log_probabilities(**json.load(sys.stdin)), sys.stdout)
