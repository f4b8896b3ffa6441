"""Define the figures that a rule of the zoo may use, by kind of technique, each with its meaning."""

from __future__ import annotations

from typing import Literal, get_args

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
