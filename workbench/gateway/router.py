"""Choose the model that answers: rules first, then a small classifier, then fallbacks. Each step gives its reason."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from workbench.custom import load_custom
from workbench.errors import describe_error, nearest
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
NUM_WORDS_SHOWN = 3  # of those that decided, in a reason
Texts = Annotated[tuple[str, ...], Field(min_length=1)]


class RoutingRule(Settings):
    """Send a call to `to` if all conditions that are given hold."""

    to: str
    models: tuple[str, ...] = ()  # that the client named
    tenants: tuple[str, ...] = ()
    min_characters: int | None = None  # of the prompts
    max_characters: int | None = None
    tools: bool | None = None  # whether the call offers tools
    words: tuple[str, ...] = ()  # one of them is in the last message, whole and without regard to case

    @model_validator(mode="after")
    def _some(self) -> RoutingRule:
        if self == RoutingRule.model_construct(to=self.to):
            raise ValueError(f"the rule to {self.to!r} has no condition: give models, or name it as an alias")
        return self


class LearnedChoice(Settings):
    """Choose a cheap or a strong model by examples of both (naive Bayes over words), or by a function."""

    models: tuple[str, ...]  # that the client named and that are to be chosen for
    cheap: str
    strong: str
    cheap_examples: Texts | None = None
    strong_examples: Texts | None = None
    classifier: CustomPart | None = None  # a function: text of the last message -> probability that `strong` is needed
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5  # from this probability on, the strong model answers
    seconds: Annotated[float, Field(gt=0)] = 2.0  # for the classifier
    on_failure: Literal["strong", "cheap", "refuse"] = "strong"  # where it fails or is late

    @model_validator(mode="after")
    def _one_way(self) -> LearnedChoice:
        by_examples = self.cheap_examples is not None and self.strong_examples is not None
        if by_examples == (self.classifier is not None):
            raise ValueError("give cheap_examples and strong_examples, or a classifier")
        return self


class RouterConfig(Settings):
    """Rules in order, of which the first that holds decides; then the learned choice; then fallbacks."""

    rules: tuple[RoutingRule, ...] = ()
    learned: LearnedChoice | None = None
    fallbacks: dict[str, tuple[str, ...]] = {}  # by model: those that answer in its place, in order


@dataclass(frozen=True)
class RoutingDecision:
    """The model that answers, and a reason for each step from the one that was named."""

    asked: str
    model: str
    reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {"asked": self.asked, "model": self.model, "reasons": list(self.reasons)}


class ModelRouter:
    """Choose a model for each call.

    Raises:
        WorkbenchError: where a user part cannot be loaded.
    """

    def __init__(self, config: RouterConfig):
        self.config = config
        self._probability = _probability(config.learned)
        self._threads = WorkThreads()

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return names that clients may give beside those of models."""
        named = [*(name for rule in self.config.rules for name in rule.models), *self.config.fallbacks]
        return tuple(dict.fromkeys([*named, *(self.config.learned.models if self.config.learned else ())]))

    async def choose(
        self, call: Call, models: ModelCatalog, allowed: Callable[[str], bool] = lambda _: True
    ) -> RoutingDecision:
        """Return the model for a call; only models that are `allowed` are chosen.

        Raises:
            ApiError: not_found_error for an unknown model, permission_error for one that is not allowed, and
                unavailable_error where neither it nor a fallback takes calls now, or the classifier fails and
                `on_failure` is refuse.
        """
        model, reason = call.model, ""
        if self.config.rules:
            model, reason = await self._threads.run(lambda: self._by_rule(call, allowed))
        learned = self.config.learned
        if not reason and learned is not None and call.model in learned.models:
            model, reason = await self._by_classifier(learned, call, allowed)
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

    async def _by_classifier(
        self, learned: LearnedChoice, call: Call, allowed: Callable[[str], bool]
    ) -> tuple[str, str]:
        try:
            probability, words = await self._threads.run(
                lambda: self._probability(last_message(call.prompts[0])), learned.seconds
            )
        except Exception as error:
            LOG.error("router: the classifier failed: %s", describe_error(error))
            if learned.on_failure == "refuse":
                message = "model: cannot be chosen now; try again, or name one"
                raise ApiError("unavailable_error", message, "model", "overloaded", {"retry-after": "1"}) from None
            wanted = learned.strong if learned.on_failure == "strong" else learned.cheap
            why = f"the classifier failed ({describe_error(error)})"
        else:
            wanted = learned.strong if probability >= learned.threshold else learned.cheap
            because = f" ({', '.join(words)})" if words else ""
            why = f"classifier: strong is needed with probability {probability:.2f}{because}"
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
    """Return the text of the last message of the user's; of a plain text all of it."""
    if not isinstance(prompt, Conversation):
        return prompt if isinstance(prompt, str) else ""
    turns = [turn for turn in prompt.turns if turn.role == "user"]
    return turns[-1].content if turns else ""


def _holds(rule: RoutingRule, call: Call) -> str:
    """Return why a rule holds; empty if it does not."""
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


def _probability(learned: LearnedChoice | None) -> Callable[[str], tuple[float, Sequence[str]]]:
    if learned is None:
        return lambda _: (0.0, ())
    if learned.classifier is not None:
        function = load_custom(learned.classifier)
        return lambda text: (float(function(text)), ())
    bayes = NaiveBayes({"cheap": learned.cheap_examples or (), "strong": learned.strong_examples or ()})
    return lambda text: bayes.probability(text, "strong")


class NaiveBayes:
    """Tell kinds of texts apart by their words (multinomial, add-one smoothing; Manning et al., 2008, chapter 13).

    Args:
        examples: texts of each kind. Kinds are equally likely before a text is read.
    """

    def __init__(self, examples: Mapping[str, Collection[str]]):
        self._counts = {
            kind: Counter(words for each in texts for words in _words(each)) for kind, texts in examples.items()
        }
        self._known = {word for counts in self._counts.values() for word in counts}

    def probability(self, text: str, kind: str) -> tuple[float, list[str]]:
        """Return the probability that a text is of a kind, and the words that say most for or against it."""
        words = [word for word in _words(text) if word in self._known]
        logs = {each: math.fsum(self._log(word, each) for word in words) for each in self._counts}
        largest = max(logs.values())
        weights = {each: math.exp(value - largest) for each, value in logs.items()}
        probability = weights[kind] / math.fsum(weights.values())
        others = [each for each in self._counts if each != kind]
        weight = {word: self._log(word, kind) - max(self._log(word, each) for each in others) for word in words}
        decisive = sorted(set(words), key=lambda word: (-abs(weight[word]), word))
        return probability, decisive[:NUM_WORDS_SHOWN]

    def _log(self, word: str, kind: str) -> float:
        counts = self._counts[kind]
        return math.log((counts[word] + 1) / (counts.total() + len(self._known)))


def _words(text: str) -> list[str]:
    return [word.lower() for word in WORD.findall(text)]
