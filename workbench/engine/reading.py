"""Detokenize what a step sampled, up to the end of each request."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.engine.output import Output
from workbench.errors import in_words
from workbench.request import FinishReason
from workbench.sampling.choose import Choice


@dataclass(frozen=True)
class Read:
    """What a step sampled for one request: tokens, the text to show for each, and the finish reason if it came."""

    choices: list[Choice]
    texts: list[str]
    reason: FinishReason | None = None
    error: str = ""
    accepted: int = 0  # accepted draft tokens

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(choice.token_id for choice in self.choices)


def read_out(output: Output, choices: list[Choice]) -> Read:
    """Push tokens until one ends the request or cannot be detokenized; all but the last are accepted drafts."""
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
