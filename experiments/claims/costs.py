"""What tokens cost against each other, and what spares them: routing, exact answers, long prompts, thinking, agents."""

from __future__ import annotations

from itertools import islice
from random import Random
from statistics import median

from experiments.claims.tokens import ENGINE
from workbench.economics import figures
from workbench.ledger.claim import Calculation, Claim, Measurement, Missing, Numbers, Ruling, Source, Trial
from workbench.ledger.crossings import Machine

TABLE = "the sources' prices (calculated)"
BATCHES = (1, 8, 32, 64, 128, 256)


def token_costs() -> Numbers:
    """How many times the machine's time of a prompt token an output token takes, by batch: Llama 3.1 8B on an H100 by
    the roofline, 1,000 tokens in and 200 out; and what the sources' price tables say."""
    machine = Machine.of("llama-3.1-8b", "h100")
    prompt = machine.prefill(1000) / 1000
    by_batch = {str(batch): machine.decode(1100, batch) / batch / prompt for batch in BATCHES}
    return {"batch": by_batch, "tables": figures.price_asymmetry()}


def asymmetry(found: Numbers) -> Ruling:
    """An output token takes 2 to 5 times an input token's time at every batch tried: holds; at some: with limits; at
    none: refuted."""
    fits = [batch for batch, times in found["batch"].items() if 2 <= times <= 5]
    return Ruling(
        "holds" if len(fits) == len(found["batch"]) else "holds-with-limits" if fits else "refuted",
        "times an input token's time, by batch: "
        + ", ".join(f"{batch}: {times:.1f}" for batch, times in found["batch"].items())
        + "; prices: "
        + ", ".join(f"{name} {times:g}" for name, times in found["tables"].items()),
        f"as cost of the machine at a batch of {', '.join(fits)}; what is asked for it is each vendor's choice",
        {f"times at a batch of {batch}": times for batch, times in found["batch"].items()},
    )


def routed() -> Numbers:
    from workbench.traffic.generators import azure_conversations

    return figures.router_savings(arrivals=list(islice(azure_conversations(Random(0)), 5000)))


def router(found: Numbers) -> Ruling:
    """70% is saved where at most half of the bill is simple: holds; where more must be: with limits; never: refuted."""
    needed = [one["simple_share_of_bill"] for one in found.values()]
    known = [share for share in needed if share is not None]
    return Ruling(
        "refuted" if not known else "holds" if max(needed, default=1) <= 0.5 else "holds-with-limits",
        "; ".join(
            f"{times} times cheaper: {one['most_saved']:.1%} at most, 70% where "
            f"{_share(one['simple_share_of_bill'])} of the "
            f"bill is simple ({_share(one['simple_share_of_questions'])} of Azure's questions, the cheapest)"
            for times, one in found.items()
        ),
        f"where {min(known, default=1):.0%} to {max(known, default=1):.0%} of the bill is simple, and the small "
        "model's answers will do, which needs a second model to be tested",
        {f"share of the bill, {times} times cheaper": one["simple_share_of_bill"] for times, one in found.items()},
    )


def _share(value: float | None) -> str:
    return "no share" if value is None else f"{value:.0%}"


def answers() -> Numbers:
    """Requests of Mooncake's conversations whose prompt was asked before; and whether a greedy answer comes again."""
    from workbench.engine.load import load
    from workbench.engine.runner import generate
    from workbench.request import Request, SamplingParameters
    from workbench.traffic.generators import mooncake_conversations

    runner = load("demo", dtype="float32", lane="eager", pages=16)
    assert runner.tokenizer is not None
    ids, sampling = tuple(runner.tokenizer.encode("def mean(xs):\n")), SamplingParameters(temperature=0, max_tokens=32)
    told = {tuple(generate(runner, [Request("a", ids, sampling)])["a"].token_ids) for _ in range(3)}
    return figures.exact_cache(list(islice(mooncake_conversations(Random(0)), 3000))) | {"answers": len(told)}


def exact(found: Numbers) -> Ruling:
    """The same request alone has one greedy answer: else refuted; at least a tenth of recorded requests was asked
    before: holds; fewer: with limits."""
    often = found["hit_rate"] >= 0.1
    return Ruling(
        "refuted" if found["answers"] != 1 else "holds" if often else "holds-with-limits",
        f"{found['answers']} answer in three tries; of {found['requests']:,} requests {found['hits']:,} "
        f"({found['hit_rate']:.1%}) "
        f"were asked before, which saves {found['saved_share']:.1%} of the bill (Mooncake's conversations, by blocks)",
        f"it is right, and rarely of use in conversations: {found['hit_rate']:.1%} hits",
        {"hit rate": found["hit_rate"], "share of the bill saved": found["saved_share"]},
    )


def similar(found: Numbers) -> Ruling:
    """A fifth of 500 queries at least is found by a cosine of 0.95, and at most 1% of what is found is the wrong
    answer: holds; at most 5%: with limits; else refuted."""
    wrong, hits = found["wrong_share"], found["hit_rate"]
    good = hits >= 0.2 and wrong <= 0.01
    return Ruling(
        "holds" if good else "holds-with-limits" if hits > 0 and wrong <= 0.05 else "refuted",
        f"{hits:.0%} found, {wrong:.1%} of them wrong",
        "rarely, or not always rightly",
    )


def rich(found: Numbers) -> Ruling:
    """With every source's prices the long prompt costs less for answers of up to 50 tokens at least: holds; with some:
    with limits; with none: refuted."""
    up_to = {name: one["answer_up_to"] for name, one in found.items() if "answer_up_to" in one}
    fits = [name for name, tokens in up_to.items() if tokens >= 50]
    return Ruling(
        "holds" if len(fits) == len(up_to) else "holds-with-limits" if fits else "refuted",
        "it costs less for answers of up to so many tokens: "
        + ", ".join(f"{name} {tokens:.0f}" if tokens >= 0 else f"{name} never" for name, tokens in up_to.items()),
        f"with the prices of {', '.join(fits)}: an output token must cost 4 input tokens or more",
        {f"answer up to, {name}": tokens for name, tokens in up_to.items()},
    )


def hidden(quick: bool) -> Numbers:
    """Of one text of the demo whose first three quarters are hidden: seconds of a decode step in either part, and
    tokens in the cache at its end."""
    from workbench.engine.load import load
    from workbench.request import Request, SamplingParameters
    from workbench.trace.events import Stepped

    runner, tokens = load("demo", pages=16), 64 if quick else 256
    assert runner.tokenizer is not None
    ids = tuple(runner.tokenizer.encode("<|think|>", special=True) + runner.tokenizer.encode("def f(x):\n"))
    asked = Request("thinking", ids, SamplingParameters(temperature=0, max_tokens=tokens, ignore_eos=True))
    for _ in range(2):
        steps = [e for e in runner.stream([asked]) if isinstance(e, Stepped) and e.phase == "decode"]
    seconds, cut = [step.wall_seconds for step in steps], len(steps) * 3 // 4
    formula = runner.store.bytes_per_token
    return {
        "times": median(seconds[:cut]) / median(seconds[cut:]),
        "cached_tokens": max(step.kv_bytes for step in steps) / formula,
        "text_tokens": len(ids) + tokens,
        **figures.thinking_tokens(),
    }


def thinking(found: Numbers) -> Ruling:
    """A hidden token takes 0.8 to 1.2 times a shown one's step, and all of them stand in the cache: holds; 0.5 to 2
    times: with limits; else refuted."""
    times = found["times"]
    kept = found["cached_tokens"] >= found["text_tokens"] - 1
    return Ruling(
        "refuted" if not kept or not 0.5 <= times <= 2 else "holds" if 0.8 <= times <= 1.2 else "holds-with-limits",
        f"a hidden token's step takes {times:.2f} times a shown one's; the cache holds {found['cached_tokens']:,.0f} "
        f"(whole pages) for a text of {found['text_tokens']:,}; 2,000 hidden tokens before 200 make the bill "
        f"{found['times_the_bill']:g} times as high ({found['share_of_bill']:.0%} of it)",
        "later tokens have longer contexts before them",
        {"times a shown token's step": times, "times the bill": found["times_the_bill"]},
    )


def agent(found: Numbers) -> Ruling:
    """Fifteen calls with a cache prefill at most a tenth of what they do without: holds; at most half: with limits;
    else refuted."""
    share, cold = (found[name] / found["prefilled"] for name in ("prefilled_warm", "prefilled_cached"))
    return Ruling(
        "holds" if share <= 0.1 else "holds-with-limits" if share <= 0.5 else "refuted",
        f"15 calls on 200,000 tokens, 5,000 new each: {found['prefilled']:,} tokens prefilled without a cache, "
        f"{found['prefilled_warm']:,} ({share:.1%}) where the beginning is known and {found['prefilled_cached']:,} "
        f"({cold:.1%}) where it is not; ${found['cost']:.2f}, ${found['cost_warm']:.2f}, ${found['cost_cached']:.2f}",
        f"{share:.0%} of the tokens",
        {"share prefilled, known beginning": share, "share prefilled, new": cold},
    )


def _router(share: float | None) -> Numbers:
    return {"20": {"most_saved": 0.95, "simple_share_of_bill": share, "simple_share_of_questions": share}}


def _agent(share: float) -> Numbers:
    tokens = dict.fromkeys(("prefilled_warm", "prefilled_cached"), round(share * 1000)) | {"prefilled": 1000}
    return tokens | {"cost": 1.0, "cost_warm": share, "cost_cached": share}


BILL = {"times_the_bill": 6.0, "share_of_bill": 0.8, "cached_tokens": 320.0, "text_tokens": 270}

CLAIMS = (
    Claim(
        id="price-asymmetry",
        says="Output tokens cost 5 times input tokens (A), or 2 to 4 times (E)",
        sources=(Source("A", "$3 and $15 per million: 5 times"), Source("E", "2 to 4 times")),
        trials=(
            Trial(
                Calculation(token_costs, "roofline: 1 x h100"),
                asymmetry,
                refuted_by={"batch": {"1": 300.0, "64": 50.0}, "tables": {"A": 5.0}},
                met_by={"batch": {"64": 5.0, "256": 3.0}, "tables": {"A": 5.0}},
            ),
        ),
    ),
    Claim(
        id="router-savings",
        says="Sending simple questions to a model 20 to 30 times cheaper saves 70% or more",
        sources=(Source("B", "20 to 30 times, 70%"),),
        trials=(Trial(Calculation(routed, TABLE), router, refuted_by=_router(None), met_by=_router(0.4)),),
    ),
    Claim(
        id="exact-cache",
        says="Answers at temperature 0 can be cached by exact input",
        sources=(Source("B", "without figures"),),
        trials=(
            Trial(
                Calculation(answers, f"recorded traffic (fitted), {ENGINE}"),
                exact,
                refuted_by={"answers": 2, "requests": 100, "hits": 20, "hit_rate": 0.2, "saved_share": 0.2},
                met_by={"answers": 1, "requests": 100, "hits": 20, "hit_rate": 0.2, "saved_share": 0.2},
            ),
        ),
    ),
    Claim(
        id="semantic-cache",
        says="Above it, a cache keyed by the similarity of embeddings (cosine 0.95) answers what means the same",
        sources=(Source("B", "cosine 0.95; 500 queries on Redis"),),
        trials=(
            Trial(
                Missing("an embedding model, a gateway in front of it, and queries with their right answers"),
                similar,
                refuted_by={"hit_rate": 0.5, "wrong_share": 0.2},
                met_by={"hit_rate": 0.3, "wrong_share": 0.005},
            ),
        ),
    ),
    Claim(
        id="rich-prompt",
        says="A prompt of 2,000 tokens with a short answer costs less than one of 200 with an answer of 500",
        sources=(Source("A", "2,000 tokens and a short answer against 200 and 500"),),
        trials=(
            Trial(
                Calculation(figures.rich_prompt, TABLE),
                rich,
                refuted_by={"A": {"answer_up_to": -400.0}},
                met_by={"A": {"answer_up_to": 140.0}},
            ),
        ),
    ),
    Claim(
        id="thinking-tokens",
        says="Reasoning tokens are ordinary tokens that are hidden: they fill context and cost as much",
        sources=(Source("D", "without figures"),),
        trials=(
            Trial(
                Measurement("hidden_tokens", hidden),
                thinking,
                refuted_by=BILL | {"times": 0.1},
                met_by=BILL | {"times": 0.98},
            ),
        ),
    ),
    Claim(
        id="agent-loop",
        says="One message may mean fifteen calls of tools, each on the whole text; a cache leaves only its new tail",
        sources=(Source("D", "fifteen calls; 200,000 tokens cached for 5,000 new"),),
        trials=(
            Trial(Calculation(figures.agent_loop_figures, TABLE), agent, refuted_by=_agent(1.0), met_by=_agent(0.02)),
        ),
    ),
)
