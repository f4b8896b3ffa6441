"""Check the tokens of a request for its end, and turn them into text."""

from __future__ import annotations

from typing import NamedTuple

from workbench.errors import WorkbenchError
from workbench.prompt.detokenize import Detokenizer, WholeText
from workbench.prompt.tokenizer import Tokenizer
from workbench.request import FinishReason, Request


class End(NamedTuple):
    """The cause of a text's end, or none.

    `by` is eos, stop_token, stop_string, max_tokens or context (the model's is full); `stop` is the token id or the
    stop string.
    """

    by: str = ""
    stop: int | str | None = None


NO_END = End()


class Output:
    """A stop checker: it detokenizes, and finds the end by an end token, a stop string or a limit."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, end_ids: tuple[int, ...], context: int):
        sampling = request.sampling
        if sampling.stop and tokenizer is None:
            raise WorkbenchError(
                f"request {request.request_id}: stop strings need a tokenizer, and this model has none; "
                "use stop_token_ids"
            )
        self._detokenizer = None
        if tokenizer is not None:
            whole = request.whole and not sampling.stop  # a stop string needs every token's text
            self._detokenizer = WholeText(tokenizer) if whole else Detokenizer(tokenizer, sampling.stop)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._end_ids = frozenset(() if sampling.ignore_eos else end_ids)
        self._own_limit = sampling.max_tokens
        self.end = NO_END
        self.ends = {*self._stop_ids, *self._end_ids}
        self.most = min(sampling.max_tokens, context - len(request.prompt_ids))
        self._count = 0

    def push(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Take the next token; return the text to show now, and the finish reason if this is the end."""
        self._count += 1
        if token_id in self.ends:
            self.end = End("eos" if token_id in self._end_ids else "stop_token", token_id)
            return "", FinishReason.STOP
        text = self._detokenizer.push(token_id) if self._detokenizer is not None else ""
        if self._detokenizer is not None and self._detokenizer.stopped is not None:
            self.end = End("stop_string", self._detokenizer.stopped)
            return text, FinishReason.STOP
        if self._count >= self.most:
            self.end = End("max_tokens" if self._count >= self._own_limit else "context")
            return text, FinishReason.LENGTH
        return text, None

    def finish(self) -> str:
        """Return text that was held back."""
        return self._detokenizer.finish() if self._detokenizer is not None else ""

    @property
    def text(self) -> str:
        return self._detokenizer.text if self._detokenizer is not None else ""
