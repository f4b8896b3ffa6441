"""One request's output as it grows: its text, and whether it has ended."""

from __future__ import annotations

from workbench.errors import WorkbenchError
from workbench.prompt.detokenize import Detokenizer, WholeText
from workbench.prompt.tokenizer import Tokenizer
from workbench.request import FinishReason, Request


class Output:
    """Turns tokens into text that may be shown, and finds the end: an end token, a stop, or a limit."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, end_ids: tuple[int, ...], context: int):
        sampling = request.sampling
        if sampling.stop and tokenizer is None:
            raise WorkbenchError(
                f"request {request.request_id}: stop strings need a tokenizer, and this model has none; "
                "use stop_token_ids"
            )
        self._detokenizer = None
        if tokenizer is not None:
            whole = request.whole and not sampling.stop  # to find a stop string every token's text is wanted
            self._detokenizer = WholeText(tokenizer) if whole else Detokenizer(tokenizer, sampling.stop)
        self.ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else end_ids)}
        self.most = min(sampling.max_tokens, context - len(request.prompt_ids))
        self._count = 0

    def push(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Take the next token; the text to show now, and the reason if this is the end."""
        self._count += 1
        if token_id in self.ends:
            return "", FinishReason.STOP
        text = self._detokenizer.push(token_id) if self._detokenizer is not None else ""
        if self._detokenizer is not None and self._detokenizer.stopped is not None:
            return text, FinishReason.STOP
        if self._count >= self.most:
            return text, FinishReason.LENGTH
        return text, None

    def finish(self) -> str:
        """What was still held back."""
        return self._detokenizer.finish() if self._detokenizer is not None else ""

    @property
    def text(self) -> str:
        return self._detokenizer.text if self._detokenizer is not None else ""
