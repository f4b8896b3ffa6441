"""Let demo-chat think without showing the thought, and compare the step time of hidden and shown tokens, for
`thinking-tokens`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from workbench.claims.summary import Figures
from workbench.economics import figures

QUESTIONS = ("What is 12 * 34?", "How many minutes are 3 hours and 20 minutes?", "What is the capital of France?")
PAGE_SIZE, BUDGET, ROUNDS = 16, 64, 5


def hidden_thought(quick: bool, model: str = "demo-chat") -> Figures:
    """Return the step time of hidden tokens relative to shown ones, the number of tokens in the cache and in the text,
    and whether all of these are cached (but for the last, which no step reads).

    Each question is answered by demo-chat alone, with a thought of at most 64 tokens that is not shown; the first round
    is not counted. `times` is the median over rounds of the ratio of median step times. Adds the calculated bill of an
    example (`economics.figures`).
    """
    from workbench.engine.load import load
    from workbench.prompt.conversation import Conversation
    from workbench.trace.events import Decoded, Finished, Stepped

    runner = load(model, backend="eager", page_size=PAGE_SIZE)
    ratios, cached, text = [], 0, 0
    for turn in range(3 if quick else ROUNDS + 1):
        steps: dict[str, list[float]] = {"thought": [], "text": []}
        for question in QUESTIONS:
            asked = Conversation(template_arguments={"enable_thinking": True}).user(question)
            thinking = {"budget_tokens": BUDGET, "shown": False}
            events = list(runner.stream(asked, temperature=0, max_tokens=200, ignore_eos=True, thinking=thinking))
            decoded = [event for event in events if isinstance(event, Decoded)]
            for before, after in pairwise(decoded):
                if before.channel == after.channel:
                    steps[after.channel].append(after.time - before.time)
            (end,) = [event for event in events if isinstance(event, Finished)]
            pages = max(event.pages_used for event in events if isinstance(event, Stepped))
            if end.thinking_tokens and pages * PAGE_SIZE > cached:
                cached, text = pages * PAGE_SIZE, end.prompt_tokens + len(end.token_ids)
        if turn:
            ratios.append(_ratio(steps["thought"], steps["text"]))
    return {
        "times": statistics.median(ratios),
        "cached_tokens": cached,
        "text_tokens": text,
        "all_cached": cached >= text - 1,
        **figures.thinking_tokens(),
    }


def _ratio(hidden: Sequence[float], shown: Sequence[float]) -> float:
    return statistics.median(hidden) / statistics.median(shown)
