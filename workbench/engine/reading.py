"""Detokenize what a step sampled, up to the end of each request."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.engine.output import StopChecker
from workbench.errors import describe_error
from workbench.request import FinishReason
from workbench.sampling.choose import SampledToken


@dataclass(frozen=True)
class DetokenizedTokens:
    """What a step sampled for one request: tokens, the text to show for each, and the finish reason if it came."""

    tokens: list[SampledToken]
    texts: list[str]
    finish_reason: FinishReason | None = None
    error: str = ""
    num_accepted: int = 0  # accepted draft tokens

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(choice.token_id for choice in self.tokens)


def detokenize(stop_checker: StopChecker, sampled: list[SampledToken]) -> DetokenizedTokens:
    """Push tokens until one ends the request or cannot be detokenized; all but the last are accepted drafts."""
    texts: list[str] = []
    accepted = len(sampled) - 1
    for place, choice in enumerate(sampled):
        if choice.error:
            return DetokenizedTokens(sampled[:place], texts, error=choice.error, num_accepted=accepted)
        try:
            text, reason = stop_checker.push(choice.token_id)
        except Exception as error:  # an id, say, that the model has and the tokenizer lacks
            return DetokenizedTokens(sampled[: place + 1], texts, error=describe_error(error), num_accepted=accepted)
        texts.append(text)
        if reason is not None:
            return DetokenizedTokens(sampled[: place + 1], texts, reason, num_accepted=accepted)
    return DetokenizedTokens(sampled, texts, num_accepted=accepted)
