"""Turn token ids into text while they are generated."""

from __future__ import annotations

import codecs
from typing import Protocol

from workbench.prompt.tokenization.stops import StopStringSearch
from workbench.prompt.tokenization.tokenizer import FALLBACK, LeadingStrip, Tokenizer


class Detokenizer:
    """An incremental detokenizer: the joined results of `push` and `finish` equal `tokenizer.decode`, cut at the stop
    string.

    Generation stops at the first token that completes a stop string (`matched_stop`). The text is cut where the
    earliest one starts; of several that start there, the shortest counts. Only text that may still become another
    character or a stop string is held back. The cost of a token is that of its bytes.
    `tokenizers.decoders.DecodeStream` breaks three of its laws (experiments/LOG.md, 2026-11-22).
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()):
        self._tokenizer = tokenizer
        self._stream: _Stream = _WindowStream(tokenizer) if tokenizer.byte_rule is None else _ByteStream(tokenizer)
        self._search = StopStringSearch(stop) if stop else None
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """Return all text shown so far."""
        return "".join(self._shown)

    @property
    def matched_stop(self) -> str | None:
        """Return the stop string that ended the text, or None; nothing is shown after it."""
        return self._search.matched_stop if self._search is not None else None

    def push(self, token_id: int) -> str:
        """Return the text that may be shown after `token_id`; WorkbenchError for an id out of range."""
        token_id = self._tokenizer.checked_id(token_id)
        if self._tokenizer.is_special(token_id):
            return ""
        text = self._stream.push(token_id)
        return self._show(text if self._search is None else self._search.push(text))

    def finish(self) -> str:
        """Return held-back text at the end; bytes that never became a character are U+FFFD."""
        text = self._stream.finish()
        return self._show(text if self._search is None else self._search.push(text) + self._search.finish())

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text


class WholeTextDetokenizer:
    """A detokenizer without stop strings that decodes once, at the end."""

    matched_stop = None

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self.text = ""

    def push(self, token_id: int) -> str:
        self._ids.append(self._tokenizer.checked_id(token_id))
        return ""

    def finish(self) -> str:
        self.text = self._tokenizer.decode(self._ids)
        return self.text


class _Stream(Protocol):
    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class _ByteStream:
    """Detokenize with a byte rule: a token adds its bytes, and a character is shown with its last byte."""

    def __init__(self, tokenizer: Tokenizer):
        assert tokenizer.byte_rule is not None
        self._tokenizer, self._front = tokenizer, LeadingStrip(tokenizer.byte_rule)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        pending = self._utf8.getstate()[0]
        # Python waits for the third byte of a surrogate, which is no character whatever that byte is.
        if pending[:1] == b"\xed" and pending[1:] >= b"\xa0":
            text += self._utf8.decode(b"", final=True)
        return self._front.strip(text)

    def finish(self) -> str:
        return self._front.strip(self._utf8.decode(b"", final=True))


class _WindowStream:
    """Detokenize with other decoders (WordPiece, Metaspace, none): a token adds the growth of the last few tokens'
    text.

    The window begins with the tokens that were shown last, because a token may look different at the front of a text.
    More tokens only lengthen a text with these decoders.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._known = 0  # tokens of the window whose text is shown
        self._text = ""  # their text

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        # A run of single bytes is decoded as one, so its text is not settled before its end.
        if self._is_byte(token_id) or text.endswith("\ufffd") or not text.startswith(self._text):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._tokenizer.decode(self._window))

    def _advance(self, text: str) -> str:
        new = text[len(self._text) :]
        self._window = self._window[self._known :]
        self._known = len(self._window)
        self._text = self._tokenizer.decode(self._window)
        return new

    def _is_byte(self, token_id: int) -> bool:
        return FALLBACK.fullmatch(self._tokenizer.id_to_token(token_id)) is not None
