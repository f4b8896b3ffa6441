"""Calls and models for the tests of the gateway."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.prompt.conversation import Conversation
from workbench.request import SamplingParameters
from workbench.serve.answers.pieces import Ended, Piece, PromptRead, Text, Used
from workbench.serve.call import Call, Caller
from workbench.serve.gate import Outcome

Json = dict[str, Any]
numbers = itertools.count()
ALICE = Caller("key", "tenant", "salt", frozenset({"*"}))
BOB = Caller("other", "bob", "other salt", frozenset({"*"}))


def chat(text: str = "What is 2 + 3?", model: str = "demo", **values: Any) -> Call:
    conversation = Conversation(turns=[text], system=values.pop("system", None), tools=values.pop("tools", ()))
    sampling = values.pop("sampling", {"temperature": 0, "max_tokens": 16})
    values.setdefault("has_seed", "seed" in sampling)
    dialect, caller = values.pop("dialect", "openai.chat"), values.pop("caller", ALICE)
    return Call(
        f"chatcmpl-{next(numbers)}", dialect, model, (conversation,), SamplingParameters(**sampling), caller=caller,
        **values,
    )  # fmt: skip


@dataclass
class Models:
    """Models whose tokens are characters."""

    known: Sequence[str] = ("demo-draft", "demo", "demo-chat")
    away: dict[str, str] = field(default_factory=dict)
    weights: str = "1"
    context: int = 1_000_000
    tokenized: int = 0  # calls

    def names(self) -> Collection[str]:
        return self.known

    def fingerprint(self, model: str, tenant: str) -> str:
        return self.weights and f"{model}@{self.weights}"

    def max_model_len(self, model: str) -> int:
        return self.context

    def unavailable(self, model: str) -> str:
        return self.away.get(model, "")

    async def prompt_ids(self, call: Call) -> tuple[tuple[int, ...], ...]:
        self.tokenized += 1
        return tuple(each if isinstance(each, tuple) else tuple(map(ord, _text(each))) for each in call.prompts)

    async def decode(self, model: str, ids: Sequence[int]) -> str | None:
        return "".join(map(chr, ids))


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "".join(str(each) for each in prompt.messages())


def answer(text: str = "5.", prompt_tokens: int = 20, choices: int = 1) -> list[Piece]:
    """Return the pieces of a whole answer, a token a character."""
    pieces: list[Piece] = []
    for choice in range(choices):
        pieces.append(PromptRead(choice, prompt_tokens=prompt_tokens))
        pieces += [Text(choice, text=each, token_ids=(ord(each),)) for each in text]
        pieces.append(Ended(choice, token_ids=tuple(map(ord, text))))
    used = Used(prompt_tokens=prompt_tokens, completion_tokens=len(text) * choices)
    return [*pieces, used]


def outcome(pieces: list[Piece], ended: str = "finished") -> Outcome:
    (used,) = (each for each in pieces if isinstance(each, Used))
    return Outcome(used, ended)
