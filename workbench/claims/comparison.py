"""Define the experiment that compares a technique with its baseline, by kind: its workload, its variants `baseline` and
`technique`, and the figures that a rule may use."""

from __future__ import annotations

from typing import Any, Literal, get_args

Kind = Literal["attention", "format", "eviction", "sampling", "draft", "schedule"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_CACHE = {
    "bits_per_byte": "bits per byte of held-out text, with the technique",
    "bits_per_byte_ratio": "bits per byte of held-out text, relative to the baseline",
    "kl": "mean KL divergence, in nats per token, from the unchanged model in float32 with a dense cache",
    "copying": "log-probability that an identifier gains by its assignment in the context, relative to the baseline",
    "needle": "copying, for assignments at the beginning of the context only",
    "bytes_ratio": "bytes of the pages that one sequence holds as it decodes, relative to the baseline",
    "decode_time_ratio": "time of a decode step at the longest timed context, relative to the baseline",
}
FIGURES: dict[Kind, dict[str, str]] = {
    "attention": _CACHE,
    "format": _CACHE,
    "eviction": _CACHE,
    "sampling": {
        "distinct_ratio": "fraction of distinct 4-grams in the texts, relative to the baseline",
        "loops": "number of texts that end in a loop, with the technique",
        "baseline_loops": "number of baseline texts that end in a loop, of as many texts",
        "loop_ratio": "number of texts that end in a loop, plus one, over the baseline's number plus one",
        "bits_per_byte_ratio": "bits per byte of the texts under the unchanged model, relative to the baseline's texts",
        "time_ratio": "time per token, relative to the baseline",
    },
    "draft": {
        "acceptance_length": "tokens that a verification gives on average, the target's own token included",
        "acceptance_rate": "fraction of the drafted tokens that are accepted",
        "steps_ratio": "number of decode steps for the same tokens, relative to the baseline",
        "time_ratio": "time per token with one sequence at once, relative to the baseline",
    },
    "schedule": {
        "attainment": "fraction of requests that attain their objective, with the technique",
        "attainment_ratio": "fraction of requests that attain their objective, relative to the baseline",
        "ttft_p50_ratio": "median time to first token, relative to the baseline",
        "ttft_p99_ratio": "99th percentile of the time to first token, relative to the baseline",
        "e2el_mean_ratio": "mean time from arrival to the last token, relative to the baseline",
        "fairness": "Jain's index of the tokens computed for each tenant while all of them had requests",
        "decision_us": "mean time of one decision of the policy, in microseconds of this machine",
    },
}
BASELINE, TECHNIQUE = "baseline", "technique"
_QUALITY: dict[str, Any] = {
    "model": {"name": "demo", "dtype": "float32"},
    "backend": "auto",
    "workload": {
        "kind": "quality",
        "windows": 6,
        "greedy_prompts": 2,
        "greedy_tokens": 16,
        "copying": {"names": 4, "depths": [0.0, 0.5, 0.75, 1.0]},
        "speed": {"model": "shape:smollm2-135m", "contexts": [4096], "tokens": 8, "rounds": 3},
        "pool": None,
    },
}
_TRAFFIC: dict[str, Any] = {
    "model": {"name": "shape:llama-3.1-8b"},
    "schedule": {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "policy": "fcfs"},
    "executor": {"kind": "simulated", "hardware": "h100"},
    "workload": {
        "kind": "traffic",
        "lengths": {"kind": "azure"},
        "arrivals": {"kind": "bursts", "rate": 36, "size": 128},
        "requests": 3000,
        "tenants": {"a": 4, "b": 1, "c": 1},
    },
    "measure": {"slo": {"ttft": 2.0, "tpot": 0.05}},
}
SETTINGS: dict[Kind, dict[str, Any]] = {
    "attention": _QUALITY,
    "format": _QUALITY,
    "eviction": {**_QUALITY, "cache": {"page_size": 16}},
    "sampling": {
        "model": {"name": "demo"},
        "workload": {"kind": "texts", "prompts": 16, "prompt_tokens": 96, "output_tokens": 256, "repeats": 3},
    },
    "draft": {
        "model": {"name": "demo"},
        "sampling": {"temperature": 0},
        "workload": {"kind": "speculation", "prompts": 8, "prompt_tokens": 384, "output_tokens": 96, "loads": [1],
                     "rounds": 3},
    },
    "schedule": _TRAFFIC,
}  # fmt: skip
QUICK: dict[Kind, tuple[str, ...]] = {  # settings for a first look; its figures are not recorded
    **dict.fromkeys(
        ("attention", "format", "eviction"),
        ("workload.windows=1", "workload.greedy_prompts=1", "workload.copying.names=1", "workload.speed=null"),
    ),
    "sampling": ("workload.prompts=2", "workload.output_tokens=48", "workload.repeats=2"),
    "draft": ("workload.prompts=1", "workload.output_tokens=32", "workload.rounds=1"),
    "schedule": ("workload.requests=200",),
}
