"""The router: rules, a function, fallbacks, and their reasons."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench
from tests.event_loop import run_async
from tests.gateway.calls import Models, chat
from workbench.gateway.router import ModelRouter, RouterConfig
from workbench.serve.call import Call, Caller
from workbench.serve.errors import ApiError

workbench.register("test-router-length")(lambda text: "demo-draft" if len(text) < 15 else "demo-chat")
TOOL = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
CONFIG: dict[str, Any] = {
    "rules": [
        {"to": "demo-chat", "models": ["auto"], "tools": True},
        {"to": "demo", "models": ["auto"], "min_characters": 200},
        {"to": "demo-chat", "tenants": ["gold"]},
        {"to": "demo", "models": ["auto"], "words": ["SQL"]},
    ],
    "choice": {"models": ["auto"], "function": {"path": "test-router-length"}},
    "fallbacks": {"demo-chat": ["demo", "demo-draft"]},
}


def choose(call: Call, models: Models | None = None, allowed: Any = lambda _: True) -> Any:
    return run_async(ModelRouter(RouterConfig.model_validate(CONFIG)).choose(call, models or Models(), allowed))


@pytest.mark.parametrize(
    ("call", "model", "reason"),
    [
        (chat("Hi", "auto", tools=[TOOL]), "demo-chat", "rule 0: auto was asked for, tools: demo-chat"),
        (chat("x" * 200, "auto"), "demo", "rule 1: auto was asked for, 200 characters: demo"),
        (chat("Hi", "demo", caller=Caller("k", "gold")), "demo-chat", "rule 2: tenant gold: demo-chat"),
        (chat("write some sql!", "auto"), "demo", "rule 3: auto was asked for, the word 'SQL': demo"),
        (chat("good morning", "auto"), "demo-draft", "the function: demo-draft"),
        (chat("why, step by step?", "auto"), "demo-chat", "the function: demo-chat"),
    ],
)
def test_each_decision_has_its_reason(call: Call, model: str, reason: str) -> None:
    decision = choose(call)
    assert (decision.asked, decision.model) == (call.model, model)
    assert decision.reasons[0].startswith(reason)
    assert "sqlite" not in choose(chat("sqlite", "auto")).reasons[0]  # a word is whole


def test_without_a_reason_the_named_model_answers() -> None:
    assert choose(chat("Hi", "demo")).as_dict() == {"asked": "demo", "model": "demo", "reasons": []}


def test_fallbacks_in_order_with_the_reasons_of_those_before() -> None:
    models = Models(away={"demo-chat": "32 calls wait", "demo": "it is stopped"})
    decision = choose(chat("Hi", "demo-chat"), models)
    assert decision.model == "demo-draft"
    assert decision.reasons == ("demo-chat: 32 calls wait", "demo: it is stopped", "fallback: demo-draft")
    models.away["demo-draft"] = "it is stopped"
    with pytest.raises(ApiError, match="32 calls wait") as caught:
        choose(chat("Hi", "demo-chat"), models)
    assert caught.value.status == 503 and caught.value.headers["retry-after"] == "1"


def test_unknown_and_forbidden_models() -> None:
    with pytest.raises(ApiError, match="did you mean 'demo-chat'") as caught:
        choose(chat("Hi", "demo-chad"))
    assert caught.value.status == 404
    with pytest.raises(ApiError, match="may not use 'demo'") as caught:
        choose(chat("Hi", "demo"), allowed=lambda model: model == "demo-draft")
    assert caught.value.status == 403


@given(
    allowed=st.sets(st.sampled_from(Models().known)),
    away=st.sets(st.sampled_from(Models().known)),
    asked=st.sampled_from(["auto", "demo", "demo-chat", "demo-draft"]),
    text=st.sampled_from(["good morning", "prove it", "x" * 300, "sql"]),
)
def test_no_model_is_chosen_that_is_away_or_not_allowed(allowed: set, away: set, asked: str, text: str) -> None:
    models = Models(away=dict.fromkeys(away, "away"))
    try:
        decision = choose(chat(text, asked), models, allowed.__contains__)
    except ApiError as error:
        assert error.status in (403, 404, 503)
        assert asked in away or asked not in allowed or not allowed - away
    else:
        assert decision.model in allowed - away


def test_a_rule_without_a_condition_is_refused() -> None:
    with pytest.raises(ValueError, match="no condition"):
        RouterConfig.model_validate({"rules": [{"to": "demo"}]})


@pytest.mark.parametrize("otherwise", ["demo-draft", None])
@pytest.mark.parametrize("word", ["fail", "hang", "unknown"])
def test_a_function_that_fails_or_hangs_costs_no_more_than_its_choice(word: str, otherwise: str | None) -> None:
    wakes = threading.Event()

    @workbench.register("test-router-failing")
    def choose(text: str) -> str:
        if text == "hang":
            wakes.wait()
        if text == "unknown":
            return "demo-chad"
        raise SystemExit("no choice today")

    choice = {"models": ["auto"], "function": {"path": "test-router-failing"}, "otherwise": otherwise, "seconds": 0.05}
    router = ModelRouter(RouterConfig.model_validate({"choice": choice}))
    if otherwise is None:
        with pytest.raises(ApiError) as caught:
            run_async(router.choose(chat(word, "auto"), Models()))
        assert caught.value.status == 503 and caught.value.headers["retry-after"] == "1"
    else:
        decision = run_async(router.choose(chat(word, "auto"), Models()))
        assert decision.model == otherwise and decision.reasons[0].startswith("the function failed")
    wakes.set()


@pytest.mark.parametrize(
    ("least", "most", "size", "holds"), [(3, None, 2, 0), (3, None, 3, 1), (None, 3, 3, 1), (None, 3, 4, 0)]
)
def test_sizes_of_rules_are_inclusive(least: int | None, most: int | None, size: int, holds: int) -> None:
    rule = {"to": "demo-chat", "min_characters": least, "max_characters": most}
    router = ModelRouter(RouterConfig.model_validate({"rules": [rule]}))
    assert run_async(router.choose(chat("x" * size), Models())).model == ("demo", "demo-chat")[holds]
