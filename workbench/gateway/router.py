"""Choose the model for a call: by rules, then by a user's function, then by fallbacks. Each step records its reason."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, model_validator

from workbench.custom import load_custom
from workbench.errors import WorkbenchError, describe_error, nearest
from workbench.gateway.bounds import prompt_characters
from workbench.gateway.work_threads import WorkThreads
from workbench.prompt.conversation import Conversation
from workbench.request import CustomPart
from workbench.serve.call import Call, PromptInput
from workbench.serve.errors import ApiError
from workbench.serve.gate import ModelCatalog
from workbench.settings import Settings

LOG = logging.getLogger(__name__)
WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?|[^\w\s]")


class RoutingRule(Settings):
    """Send a call to `to` if all given conditions hold."""

    to: str
    models: tuple[str, ...] = ()  # models, one of which the client must name
    tenants: tuple[str, ...] = ()
    min_characters: int | None = None  # minimum characters of all prompts
    max_characters: int | None = None
    tools: bool | None = None  # the call offers tools, or (False) none
    words: tuple[str, ...] = ()  # words, one of which occurs in the last message (whole word, case-insensitive)

    @model_validator(mode="after")
    def _some(self) -> RoutingRule:
        if self == RoutingRule.model_construct(to=self.to):
            raise ValueError(f"the rule to {self.to!r} has no condition: give models, or name it as an alias")
        return self


class FunctionChoice(Settings):
    """Let a user's function choose the model for each call that names one of `models`."""

    models: tuple[str, ...]  # requested models that this choice applies to
    function: CustomPart  # function: text of the last message -> name of the model
    otherwise: str | None = None  # model if the function fails or is late; None: refuse the call
    seconds: Annotated[float, Field(gt=0)] = 2.0  # time limit of the function


class RouterConfig(Settings):
    """Rules in order (the first match decides); then the function; then fallbacks."""

    rules: tuple[RoutingRule, ...] = ()
    choice: FunctionChoice | None = None
    fallbacks: dict[str, tuple[str, ...]] = {}  # by model: replacement models, in order


@dataclass(frozen=True)
class RoutingDecision:
    """The chosen model, and a reason for each step from the requested model to it."""

    asked: str
    model: str
    reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {"asked": self.asked, "model": self.model, "reasons": list(self.reasons)}


class ModelRouter:
    """A router that chooses a model for each call.

    Raises:
        WorkbenchError: if a user-defined part cannot be loaded.
    """

    def __init__(self, config: RouterConfig):
        self.config = config
        self._choose = load_custom(config.choice.function) if config.choice else None
        self._threads = WorkThreads()

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return the model aliases that clients may use."""
        named = [*(name for rule in self.config.rules for name in rule.models), *self.config.fallbacks]
        return tuple(dict.fromkeys([*named, *(self.config.choice.models if self.config.choice else ())]))

    async def choose(
        self, call: Call, models: ModelCatalog, allowed: Callable[[str], bool] = lambda _: True
    ) -> RoutingDecision:
        """Return the model for a call, from the `allowed` models.

        Raises:
            ApiError: not_found_error for an unknown model, permission_error for a model that is not allowed, and
                unavailable_error if neither the model nor a fallback accepts calls now, or if the function fails and
                there is no `otherwise`.
        """
        model, reason = call.model, ""
        if self.config.rules:
            model, reason = await self._threads.run(lambda: self._by_rule(call, allowed))
        choice = self.config.choice
        if not reason and choice is not None and call.model in choice.models:
            model, reason = await self._by_function(choice, call, models.names(), allowed)
        reasons = [reason] if reason else []
        if model not in models.names() and model not in self.config.fallbacks:
            known = [name for name in (*models.names(), *self.aliases) if allowed(name)]
            hint = nearest(model, known) or f"; known: {', '.join(known)}"
            raise ApiError("not_found_error", f"model: {model!r} is unknown{hint}", "model", "model_not_found")
        if not allowed(model):
            raise ApiError("permission_error", f"model: this key may not use {model!r}", "model", "model_not_allowed")
        return self._available(call.model, model, reasons, models, allowed)

    def _by_rule(self, call: Call, allowed: Callable[[str], bool]) -> tuple[str, str]:
        for number, rule in enumerate(self.config.rules):
            if allowed(rule.to) and (why := _holds(rule, call)):
                return rule.to, f"rule {number}: {why}: {rule.to}"
        return call.model, ""

    async def _by_function(
        self, choice: FunctionChoice, call: Call, known: Collection[str], allowed: Callable[[str], bool]
    ) -> tuple[str, str]:
        choose = self._choose
        assert choose is not None
        try:
            wanted = await self._threads.run(lambda: str(choose(last_message(call.prompts[0]))), choice.seconds)
            if wanted not in (*known, *self.config.fallbacks):
                raise WorkbenchError(f"it returned {wanted!r}, which is not a model")
            why = "the function"
        except Exception as error:
            LOG.error("router: the function failed: %s", describe_error(error))
            if choice.otherwise is None:
                message = "model: cannot be chosen now; try again, or name one"
                raise ApiError("unavailable_error", message, "model", "overloaded", {"retry-after": "1"}) from None
            wanted, why = choice.otherwise, f"the function failed ({describe_error(error)})"
        return (wanted, f"{why}: {wanted}") if allowed(wanted) else (call.model, "")

    def _available(
        self, asked: str, model: str, reasons: list[str], models: ModelCatalog, allowed: Callable[[str], bool]
    ) -> RoutingDecision:
        for each in (model, *self.config.fallbacks.get(model, ())):
            why = models.unavailable(each) if each in models.names() else "there is no such model"
            if not why and allowed(each):
                return RoutingDecision(asked, each, (*reasons, *([f"fallback: {each}"] if each != model else ())))
            reasons.append(f"{each}: {why or 'this key may not use it'}")
        message = f"model: {'; '.join(reasons)}; ask again later"
        raise ApiError("unavailable_error", message, "model", "overloaded", {"retry-after": "1"})


def last_message(prompt: PromptInput) -> str:
    """Return the text of the last user message; for a plain text prompt, the whole text."""
    if not isinstance(prompt, Conversation):
        return prompt if isinstance(prompt, str) else ""
    turns = [turn for turn in prompt.turns if turn.role == "user"]
    return turns[-1].content if turns else ""


def _holds(rule: RoutingRule, call: Call) -> str:
    """Return why a rule matches; empty if it does not."""
    size = sum(map(prompt_characters, call.prompts))
    has_tools = any(isinstance(each, Conversation) and each.tools for each in call.prompts)
    spoken = {word.lower() for prompt in call.prompts for word in WORD.findall(last_message(prompt))}
    found = next((word for word in rule.words if word.lower() in spoken), "")
    conditions = (
        (bool(rule.models), call.model in rule.models, f"{call.model} was asked for"),
        (bool(rule.tenants), call.caller.tenant in rule.tenants, f"tenant {call.caller.tenant}"),
        (rule.min_characters is not None, size >= (rule.min_characters or 0), f"{size} characters"),
        (rule.max_characters is not None, size <= (rule.max_characters or 0), f"{size} characters"),
        (rule.tools is not None, has_tools == rule.tools, "tools" if has_tools else "no tools"),
        (bool(rule.words), bool(found), f"the word {found!r}"),
    )
    given = [(holds, why) for is_given, holds, why in conditions if is_given]
    return ", ".join(why for _, why in given) if all(holds for holds, _ in given) else ""
