"""What a step chose, as text, up to where a request ends."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.engine.output import Output
from workbench.errors import in_words
from workbench.request import FinishReason
from workbench.sampling.choose import Choice


@dataclass(frozen=True)
class Read:
    """What a step chose for one request: tokens, the text that each lets be shown, and the end if it came."""

    choices: list[Choice]
    texts: list[str]
    reason: FinishReason | None = None
    error: str = ""
    accepted: int = 0  # drafted tokens that stand

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(choice.token_id for choice in self.choices)


def read_out(output: Output, choices: list[Choice]) -> Read:
    """`choices` go to `output` one by one, until one ends the request or cannot be read. All but the last are drafted
    tokens that stand."""
    texts: list[str] = []
    accepted = len(choices) - 1
    for place, choice in enumerate(choices):
        if choice.error:
            return Read(choices[:place], texts, error=choice.error, accepted=accepted)
        try:
            text, reason = output.push(choice.token_id)
        except Exception as error:  # an id, say, that the model has and the tokenizer lacks
            return Read(choices[: place + 1], texts, error=in_words(error), accepted=accepted)
        texts.append(text)
        if reason is not None:
            return Read(choices[: place + 1], texts, reason, accepted=accepted)
    return Read(choices, texts, accepted=accepted)
