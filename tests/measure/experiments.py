"""Experiments and their values, drawn."""

from __future__ import annotations

from hypothesis import strategies as st

awkward = ["", "yes", "1e3", "~", "a: b # c", "\x85", "\u2028x", "\ufeff", " a\n b \n\n", "\tx", "\ud800", "|\n "]
words = st.text(max_size=20) | st.sampled_from([*awkward, "a" * 300])
names = st.from_regex(r"[^\W\d]\w{0,9}", fullmatch=True).filter(str.isidentifier)
counts = st.integers(1, 2**40)
seeds = st.integers(0, 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
token_ids = st.integers(0, 2**31)
parts = st.fixed_dictionaries(
    {"path": words},
    optional={"arguments": st.dictionaries(names, finite | st.integers() | words | st.booleans(), max_size=2)},
)
sampling = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 1e300),
        "top_k": st.integers(0, 10**6),
        "top_p": st.floats(0, 1, exclude_min=True),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0, 100, exclude_min=True),
        "presence_penalty": finite,
        "logit_bias": st.dictionaries(token_ids, st.floats(allow_nan=False), max_size=3),
        "filters": st.lists(parts, max_size=2),
        "sampler": st.none() | parts,
        "constraint": st.none() | parts,
        "seed": seeds,
        "stop": st.lists(words.filter(bool), max_size=3) | words.filter(bool),
        "stop_token_ids": st.lists(token_ids, max_size=3),
        "max_tokens": counts,
        "ignore_eos": st.booleans(),
        "logprobs": st.none() | st.integers(0, 100),
        "logprobs_of": st.sampled_from(["model", "filtered"]),
    },
)
workloads = st.fixed_dictionaries(
    {"kind": st.just("prompts"), "prompts": st.lists(words, min_size=1, max_size=3)}, optional={"copies": counts}
) | st.fixed_dictionaries(
    {"kind": st.just("random")},
    optional={"requests": counts, "prompt_tokens": counts, "output_tokens": counts, "seed": seeds},
)
changes = {
    "sliding_window": st.none() | counts | st.just("full"),
    "num_sink_tokens": st.integers(0, 9),
    "softcap": st.floats(0, 1e9),
    "num_kv_heads": counts | st.sampled_from(["multi_head", "multi_query"]),
    "qk_norm": st.booleans(),
    "position": st.sampled_from(["rotary", "alibi", "none"]),
    "mask": words | parts,
}


def agrees_with_itself(change: dict) -> bool:
    return not (change.get("sliding_window") == "full" and change.get("num_sink_tokens"))


change = st.fixed_dictionaries({}, optional=changes).filter(agrees_with_itself)
attention = st.fixed_dictionaries(
    {},
    optional=changes
    | {
        "pattern": st.lists(st.just("full"), max_size=3),
        "layers": st.dictionaries(st.integers(0, 99), change, max_size=2),
    },
).filter(agrees_with_itself)
values = st.fixed_dictionaries(
    {"question": words, "workload": workloads},
    optional={
        "backend": words,
        "attention": attention,
        "model": st.fixed_dictionaries(
            {}, optional={"name": words, "dtype": st.sampled_from(["auto", "float32"]), "device": words, "seed": seeds}
        ),
        "cache": st.fixed_dictionaries(
            {},
            optional={
                "page_size": counts,
                "pages": counts | st.just("auto"),
                "prefix": st.sampled_from(["off", "radix"]) | st.just({"kind": "radix", "ttl": 2.5}),
                "offload": st.sampled_from(["none", "memory"]) | st.just({"kind": "file", "path": "pages"}),
            },
        ),
        "schedule": st.fixed_dictionaries(
            {},
            optional={"max_num_seqs": counts, "overflow": st.sampled_from(["refuse", "cut_oldest"])},
        ),
        "sampling": sampling,
        "measure": st.fixed_dictionaries(
            {},
            optional={
                "warmup": st.integers(0, 9),
                "threads": st.integers(1, 64) | st.just("auto"),
                "ceilings": st.booleans(),
            },
        ),
    },
)
