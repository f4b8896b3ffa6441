"""The figures that a rule of the zoo may use, by kind of technique, each with what it says."""

from __future__ import annotations

from typing import Literal, get_args

Kind = Literal["attention", "format", "eviction", "sampling", "draft", "schedule"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_CACHE = {
    "bits_per_byte": "bits a byte of held-out text, with the technique",
    "bits_per_byte_ratio": "the same over the baseline's",
    "kl": "mean KL divergence, in nats a token, from the unchanged model in float32 with a dense cache",
    "copying": "log-probability that an identifier gains by its assignment in the context, over the baseline's gain",
    "needle": "the same for assignments at the beginning of the context only",
    "bytes_ratio": "bytes of the pages that one sequence holds as it decodes, over the baseline's",
    "decode_time_ratio": "time of a decode step at the longest context that was timed, over the baseline's",
}
FIGURES: dict[Kind, dict[str, str]] = {
    "attention": _CACHE,
    "format": _CACHE,
    "eviction": _CACHE,
    "sampling": {
        "distinct_ratio": "share of distinct 4-grams in the texts, over the baseline's",
        "loops": "texts that end in a loop, with the technique",
        "baseline_loops": "the same of the baseline's texts, which are as many",
        "loop_ratio": "texts that end in a loop, plus one, over the baseline's plus one",
        "bits_per_byte_ratio": "bits a byte of the texts under the unchanged model, over those of the baseline's texts",
        "time_ratio": "time a token, over the baseline's",
    },
    "draft": {
        "acceptance_length": "tokens that a verification gives on average, the target's own token included",
        "acceptance_rate": "share of the drafted tokens that are accepted",
        "steps_ratio": "decode steps for the same tokens, over the baseline's",
        "time_ratio": "time a token with one sequence at once, over the baseline's",
    },
    "schedule": {
        "attainment": "share of the requests that attain their objective, with the technique",
        "attainment_ratio": "the same over the baseline's",
        "ttft_p50_ratio": "median time to the first token, over the baseline's",
        "ttft_p99_ratio": "its 99th percentile, over the baseline's",
        "e2el_mean_ratio": "mean time from arrival to the last token, over the baseline's",
        "fairness": "Jain's index of the tokens computed for each tenant while all of them had requests",
        "decision_us": "mean time of one decision of the policy, in microseconds of this machine",
    },
}
