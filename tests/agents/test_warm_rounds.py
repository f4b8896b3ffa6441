"""Each round begins on the pages of the one before: what is computed of its prompt is new, up to a page."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import workbench
from tests.agents.script import runner
from tests.thorough import tries
from workbench.prompt.turns import ResultTurn
from workbench.trace.agent_events import AgentEvent, RoundFinished, RoundStarted


def measure(value: float, kind: str = "plain", words: list[str] | None = None) -> str:
    """Measure something."""
    return f"{value} {kind} {words}"


def nothing() -> None:
    """Do nothing."""


@settings(max_examples=tries(4), deadline=None)
@given(
    seed=st.integers(0, 999), temperature=st.sampled_from([0.0, 1.0, 3.0]), choice=st.sampled_from(["auto", "measure"]),
    parallel=st.booleans(), budget=st.sampled_from([None, 0, 12]), most=st.sampled_from([60, 90]),
)  # fmt: skip
def test_a_round_computes_what_is_new_and_no_more(
    seed: int, temperature: float, choice: str, parallel: bool, budget: int | None, most: int
) -> None:
    """Random models write numbers, spaces and letters as no template does: their tokens are kept as they wrote them."""
    on = runner(2048)
    thinking: dict[str, Any] = {} if budget is None else {"thinking": {"budget_tokens": budget}}
    assert on.tokenizer is not None
    controls = on.tokenizer.special_token_ids
    bias = dict.fromkeys(controls.values(), -90.0) | {controls["<|turn|>"]: 0.0}
    bias[controls["<|tool|>"]] = 9.0  # none is sampled within a thought
    agent = workbench.agent(
        on, [measure, nothing], "S", tool_choice=choice, parallel_tool_calls=parallel, limits={"rounds": 2},
        seed=seed, temperature=temperature, max_tokens=most, logit_bias=bias, **thinking,
    )  # fmt: skip
    events: list[AgentEvent] = []
    on.set_listener(lambda event: events.append(event) if isinstance(event, AgentEvent) else None)
    result = agent.run("q")
    assert result.stop_reason != "error", result.error
    result = agent.run(result.conversation.user("more"))
    assert result.stop_reason != "error", result.error
    calls = [call for turn in result.conversation.turns if turn.role == "assistant" for call in turn.tool_calls]
    if any("unparsed" in call.arguments for call in calls):  # 1e999, say: written as text from then on
        return
    page, known = on.store.page_size, 0
    for event in events:
        if isinstance(event, RoundStarted):
            assert event.prompt_tokens > known
        elif isinstance(event, RoundFinished):
            least = (known - 1) // page * page if known else 0
            assert event.cached_tokens >= least
            assert event.computed_tokens == event.prompt_tokens - event.cached_tokens
            known = event.prompt_tokens + event.output_tokens
    answers = result.conversation.prompt(on).answers
    assert set(answers.values()) == {"kept"}, answers
    assert all(turn.content is not None for turn in result.conversation.turns if isinstance(turn, ResultTurn))
