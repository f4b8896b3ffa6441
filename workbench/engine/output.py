"""Check the tokens of a request for its end, and turn them into text."""

from __future__ import annotations

from typing import NamedTuple

from workbench.errors import WorkbenchError
from workbench.prompt.detokenize import Detokenizer, WholeTextDetokenizer
from workbench.prompt.tokenizer import Tokenizer
from workbench.request import FinishReason, Request


class StopCause(NamedTuple):
    """The cause of a text's end, or none.

    `by` is eos, stop_token, stop_string, max_tokens or context (the model's is full); `stop` is the token id or the
    stop string.
    """

    by: str = ""
    stop: int | str | None = None


NOT_STOPPED = StopCause()


class StopChecker:
    """A stop checker: it detokenizes, and finds the end by an end token, a stop string or a limit."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...], max_model_len: int):
        sampling = request.sampling
        if sampling.stop and tokenizer is None:
            raise WorkbenchError(
                f"request {request.request_id}: stop strings need a tokenizer, and this model has none; "
                "use stop_token_ids"
            )
        self._detokenizer = None
        if tokenizer is not None:
            whole = request.final_only and not sampling.stop  # a stop string needs every token's text
            self._detokenizer = WholeTextDetokenizer(tokenizer) if whole else Detokenizer(tokenizer, sampling.stop)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._eos_token_ids = frozenset(() if sampling.ignore_eos else eos_token_ids)
        self._max_tokens = sampling.max_tokens
        self.cause = NOT_STOPPED
        self.end_token_ids = {*self._stop_ids, *self._eos_token_ids}
        self.max_output_tokens = min(sampling.max_tokens, max_model_len - len(request.prompt_ids))
        self._count = 0

    def push(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Take the next token; return the text to show now, and the finish reason if this is the end."""
        self._count += 1
        if token_id in self.end_token_ids:
            self.cause = StopCause("eos" if token_id in self._eos_token_ids else "stop_token", token_id)
            return "", FinishReason.STOP
        text = self._detokenizer.push(token_id) if self._detokenizer is not None else ""
        if self._detokenizer is not None and self._detokenizer.matched_stop is not None:
            self.cause = StopCause("stop_string", self._detokenizer.matched_stop)
            return text, FinishReason.STOP
        if self._count >= self.max_output_tokens:
            self.cause = StopCause("max_tokens" if self._count >= self._max_tokens else "context")
            return text, FinishReason.LENGTH
        return text, None

    def finish(self) -> str:
        """Return text that was held back."""
        return self._detokenizer.finish() if self._detokenizer is not None else ""

    @property
    def text(self) -> str:
        return self._detokenizer.text if self._detokenizer is not None else ""
