"""Claims on sampling: the order of filters, settings without effect, and the ends of a text."""

from __future__ import annotations

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
from workbench.experiment.verdict import RuleChange


def ordered() -> EvidenceNumbers:
    """Return the filters of a request's parameters, and the tokens they keep with the temperature first and last."""
    import torch

    from workbench.request import SamplingParameters
    from workbench.sampling.filters import build_filters

    chain = build_filters(SamplingParameters(temperature=1.5, top_k=40, top_p=0.9))
    row = torch.linspace(8, 0, 64)[None].exp().log1p()  # a few likely tokens and a long tail

    def kept(filters: tuple) -> int:
        left = row
        for rule in filters:
            left = rule(left, ())
        return int(left.isfinite().sum())

    return {
        "order": [type(rule).__name__ for rule in chain],
        "kept": kept(chain),
        "kept_temperature_last": kept((*chain[1:], chain[0])),
    }


def order(found: EvidenceNumbers) -> Ruling:
    """Temperature, top-k, top-p in this order: holds; another order that keeps the same tokens: with limits; else
    refuted."""
    right = found["order"] == ["Temperature", "TopK", "TopP"]
    same = found["kept"] == found["kept_temperature_last"]
    return Ruling(
        "holds" if right else "holds-with-limits" if same else "refuted",
        f"{', '.join(found['order'])}; of a long tail at temperature 1.5 {found['kept']} tokens stay, with the "
        f"temperature last {found['kept_temperature_last']}: the order {'does not matter' if same else 'matters'}",
        "the order does not matter here",
        {"tokens kept": found["kept"], "kept with the temperature last": found["kept_temperature_last"]},
    )


def at_zero() -> EvidenceNumbers:
    """Return greedy outputs of the demo under several top_p and top_k, and the share of places where one filter is
    redundant.
    """
    import torch

    from workbench.engine.load import load
    from workbench.engine.runner import generate
    from workbench.oracle.naive import logits
    from workbench.request import Request, SamplingParameters
    from workbench.sampling.filters import TopK, TopP

    runner = load("demo", dtype="float32", backend="eager", pages=16)
    assert runner.tokenizer is not None
    ids = runner.tokenizer.encode(CODE)
    outputs = set()
    for top_p, top_k in ((1.0, 0), (0.1, 0), (0.5, 3), (1.0, 50)):
        sampling = SamplingParameters(temperature=0, top_p=top_p, top_k=top_k, max_tokens=24)
        outputs.add(tuple(generate(runner, [Request("zero", tuple(ids[:24]), sampling)])["zero"].token_ids))
    with torch.no_grad():
        rows = logits(runner.model, torch.tensor(ids), torch.float32)
    by_p, by_k = TopP(0.9)(rows, ()).isfinite(), TopK(50)(rows, ()).isfinite()
    return {
        "outputs": len(outputs),
        "places": len(ids),
        "k_redundant": (~by_p | by_k).all(-1).float().mean().item(),
        "p_redundant": (~by_k | by_p).all(-1).float().mean().item(),
    }


def no_effect(found: EvidenceNumbers) -> Ruling:
    """One output whatever top_p and top_k at temperature 0: else refuted; and at 90% of the places of a text top-p of
    0.9 leaves nothing for top-k of 50 to remove: holds, else with limits."""
    redundant = found["k_redundant"]
    return Ruling(
        "refuted" if found["outputs"] != 1 else "holds" if redundant >= 0.9 else "holds-with-limits",
        f"{found['outputs']} output at temperature 0 under four settings; at {redundant:.0%} of {found['places']} "
        "places "
        f"top-k of 50 removes nothing that top-p of 0.9 has left (the other way round at {found['p_redundant']:.0%})",
        f"both together are redundant at {redundant:.0%} of the places: where the model is unsure, each removes "
        "its own",
        {"outputs at temperature 0": found["outputs"], "places where top-k is redundant": redundant},
    )


PROMPTS = ("def main():\n", "import os\n", "class Stack:\n", "# Sort a list\n", "x = [", '"""A module')
SEEDS = (1, 2, 3, 4)
ENDS_CHANGED = RuleChange(
    what="24 texts (six prompts, four seeds) instead of six; the rule stayed",
    when="2026-11-22",
    after="claims_endings-20261122-132819.json, by which the claim is refuted",
    why=(
        "that machine rounds otherwise and draws other tokens: of six texts none came to an end token, where two had "
        "on the machine of the day before (claims_endings-20261121-170043.json): six were too few to tell"
    ),
)


def endings(quick: bool) -> EvidenceNumbers:
    """Count the ends of sampled texts of the demo: few tokens allowed, a stop string, and no limit but the context."""
    from workbench.engine.load import load
    from workbench.engine.runner import generate
    from workbench.request import Request, SamplingParameters

    runner = load("demo", backend="eager")
    tokenizer, context = runner.tokenizer, runner.model.spec.max_position_embeddings
    assert tokenizer is not None
    texts = [(prompt, seed) for seed in ((1,) if quick else SEEDS) for prompt in PROMPTS]

    def ended(**asked: Any) -> list:
        requests = [
            Request(f"{seed} {prompt}", tuple(tokenizer.encode(prompt)),
                    SamplingParameters(temperature=0.8, seed=seed, **asked))
            for prompt, seed in texts
        ]  # fmt: skip
        return list(generate(runner, requests).values())

    few, stopped = ended(max_tokens=8), ended(max_tokens=400, stop=("\n\n",))
    free = ended(max_tokens=context)
    return {
        "asked": len(texts),
        "at_max_tokens": sum(str(end.reason) == "length" and len(end.token_ids) == 8 for end in few),
        "at_stop": sum(str(end.reason) == "stop" for end in stopped),
        "at_end_token": sum(str(end.reason) == "stop" for end in free),
        "to_the_context": sum(str(end.reason) == "length" for end in free),
        "longest": max(len(end.token_ids) for end in free),
        "context": context,
    }


def three_ends(found: EvidenceNumbers) -> Ruling:
    """Texts end at max_tokens, at a stop string and at the end token; without a limit some run to 2,000 tokens: holds;
    some run to the context, which is shorter: with limits; no text runs that far, or one of the ends is never seen:
    refuted."""
    ends = found["at_max_tokens"] and found["at_stop"] and found["at_end_token"]
    far = found["longest"] >= 2000
    return Ruling(
        "refuted" if not ends or not (far or found["to_the_context"]) else "holds" if far else "holds-with-limits",
        f"of {found['asked']}: {found['at_max_tokens']} at 8 tokens asked, {found['at_stop']} at a stop string; "
        f"with no limit {found['at_end_token']} at the end token and {found['to_the_context']} at the context of "
        f"{found['context']:,}",
        f"the demo's context ends texts at {found['context']:,} tokens",
        {"texts that ran to the context": found["to_the_context"], "longest text, tokens": found["longest"]},
    )


ENDED = {"asked": 6, "at_max_tokens": 6, "at_stop": 6, "at_end_token": 3, "to_the_context": 3, "longest": 1000,
         "context": 1024}  # fmt: skip

CLAIMS = (
    Claim(
        id="sample-order",
        says="Temperature, then top-k, then top-p, then one draw",
        sources=(ClaimSource("A", "this order"),),
        trials=(
            ClaimTrial(
                CalculationEvidence(ordered, ENGINE),
                order,
                examples={
                    "holds": {"order": ["Temperature", "TopK", "TopP"], "kept": 9, "kept_temperature_last": 5},
                    "holds-with-limits": {
                        "order": ["TopK", "Temperature", "TopP"],
                        "kept": 9,
                        "kept_temperature_last": 9,
                    },
                    "refuted": {"order": ["TopK", "TopP", "Temperature"], "kept": 5, "kept_temperature_last": 9},
                },
            ),
        ),
    ),
    Claim(
        id="sample-topp-at-zero",
        says="top_p has no effect at temperature 0; top_p and top_k together are usually redundant",
        sources=(ClaimSource("A", "without figures"),),
        trials=(
            ClaimTrial(
                CalculationEvidence(at_zero, ENGINE),
                no_effect,
                examples={
                    "holds": {"outputs": 1, "places": 100, "k_redundant": 0.95, "p_redundant": 0.1},
                    "holds-with-limits": {"outputs": 1, "places": 100, "k_redundant": 0.5, "p_redundant": 0.1},
                    "refuted": {"outputs": 3, "places": 100, "k_redundant": 0.95, "p_redundant": 0.1},
                },
            ),
        ),
    ),
    Claim(
        id="stop-conditions",
        says="A text ends at the end token, a stop sequence or max_tokens; unset, models run to thousands of tokens",
        sources=(
            ClaimSource("A", "thousands of tokens"),
            ClaimSource("C", "the three"),
            ClaimSource("D", "the three"),
            ClaimSource("E", "the three"),
        ),
        trials=(
            ClaimTrial(
                MeasurementEvidence("endings", endings, timed=False),
                three_ends,
                examples={"holds-with-limits": ENDED, "refuted": ENDED | {"to_the_context": 0, "longest": 300}},
                impossible={"holds": "the demo's context of 1,024 tokens ends texts before they have 2,000"},
                changed=(ENDS_CHANGED,),
            ),
        ),
    ),
)
