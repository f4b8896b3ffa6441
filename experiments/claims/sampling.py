"""Figures of claims on sampling: the order of filters, settings without effect, and the ends of a text."""

from __future__ import annotations

from typing import Any

from experiments.claims.tokens import CODE


def ordered() -> dict[str, float | str]:
    """Return whether the filters of a request are temperature, top-k and top-p in this order, the tokens that they keep
    of a long tail at temperature 1.5, with the temperature first and last, and whether these are as many."""
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

    names = [type(rule).__name__ for rule in chain]
    first, last = kept(chain), kept((*chain[1:], chain[0]))
    return {
        "in_this_order": names == ["Temperature", "TopK", "TopP"],
        "same_either_way": first == last,
        "order": ", ".join(names),
        "tokens_kept": first,
        "tokens_kept_temperature_last": last,
    }


def at_zero() -> dict[str, float | str]:
    """Return the number of greedy outputs of the demo under several top_p and top_k, and the shares of a text's places
    where top-k of 50 removes nothing that top-p of 0.9 has left, and the other way round."""
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


PROMPTS = ("def main():\n", "import os\n", "class Stack:\n", "# Sort a list\n", "x = [", '"""A module')
SEEDS = (1, 2, 3, 4)


def endings(quick: bool, model: str = "demo") -> dict[str, float | str]:
    """Count the ends of sampled texts of the model: few tokens allowed, a stop string, and no limit but the context."""
    from workbench.engine.load import load
    from workbench.engine.runner import generate
    from workbench.request import Request, SamplingParameters

    runner = load(model, backend="eager")
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
