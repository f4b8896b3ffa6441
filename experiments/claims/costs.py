"""Figures of claims on the relative cost of tokens: routing, long prompts, agents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from random import Random

from workbench.claims.break_even import RooflineMachine
from workbench.economics import figures
from workbench.simulate.arrival import Arrival

BATCHES = (1, 8, 32, 64, 128, 256)
STATED = (2, 5)  # times an input token's cost, by the sources


def token_costs(hardware: str = "h100") -> dict[str, float]:
    """Return an output token's machine time as a multiple of a prompt token's, by batch, the share of batches for which
    it is 2 to 5, and the price tables' ratios. Llama 3.1 8B on an H100 by the roofline, 1,000 tokens in and 200 out."""
    machine = RooflineMachine.build("llama-3.1-8b", hardware)
    prompt = machine.prefill(1000) / 1000
    by_batch = {batch: machine.decode(1100, batch) / batch / prompt for batch in BATCHES}
    fitting = sum(STATED[0] <= times <= STATED[1] for times in by_batch.values())
    prices = {f"times the price, {name}": times for name, times in figures.price_asymmetry().items()}
    times = {f"times the time, batch of {batch}": value for batch, value in by_batch.items()}
    return {"fitting_share": fitting / len(by_batch), **times, **prices}


def routed(arrivals: Sequence[Arrival] = (), cheaper: Sequence[int] = (20, 30)) -> dict[str, float | None]:
    """Return a router's savings for Azure's questions: the least share saved at any ratio of prices where the cheapest
    four of five questions are simple (the source says neither how many nor which); whether 70% can be saved at every
    ratio; and, by ratio, what is saved, and the share of the bill that must be simple for 70%."""
    from workbench.simulate.generators import azure_conversations

    questions = arrivals or list(islice(azure_conversations(Random(0)), 5000))
    found = figures.router_savings(arrivals=questions, cheaper=cheaper)
    return {
        "least_saved": min(one["saved_by_four_of_five"] for one in found.values()),
        "can_save_70_percent": all(one["simple_share_of_bill"] is not None for one in found.values()),
        **{f"saved, {times} times cheaper": one["saved_by_four_of_five"] for times, one in found.items()},
        **{f"share of the bill, {times} times cheaper": one["simple_share_of_bill"] for times, one in found.items()},
    }


def rich(tables: Sequence[str] = ()) -> dict[str, float]:
    """Return the tokens of an answer up to which the long prompt costs less, by price table, and the share of tables
    for which these are 50 at least."""
    found = figures.rich_prompt(tuple(tables)) if tables else figures.rich_prompt()
    up_to = {name: one["answer_up_to"] for name, one in found.items() if "answer_up_to" in one}
    return {"fitting_share": sum(tokens >= 50 for tokens in up_to.values()) / len(up_to)} | {
        f"answer up to, {name}": tokens for name, tokens in up_to.items()
    }


def agent() -> dict[str, float]:
    """Return the share of tokens that fifteen calls prefill with a cache, of what they do without: where the beginning
    is known, and where it is not; and the costs in $."""
    found = figures.agent_loop_figures()
    return {
        "prefilled_share": found["prefilled_warm"] / found["prefilled"],
        "prefilled_share_if_new": found["prefilled_cached"] / found["prefilled"],
        **{name: found[name] for name in ("prefilled", "cost", "cost_warm", "cost_cached")},
    }
