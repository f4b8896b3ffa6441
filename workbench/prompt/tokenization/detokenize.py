"""Convert token ids to text while they are generated."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from workbench.prompt.tokenization.stops import StopStringSearch
from workbench.prompt.tokenization.tokenizer import LeadingStrip, Tokenizer


class Detokenizer:
    """An incremental detokenizer: the joined results of `push` and `finish` equal `tokenizer.decode_after`, cut at the
    stop string. `before` are the tokens before the text.

    Generation stops at the first token that completes a stop string (`matched_stop`). The text is cut where the
    earliest one starts; of several that start there, the shortest counts. Only text that may still become another
    character or a stop string is held back. The cost of a token is that of its bytes.
    `tokenizers.decoders.DecodeStream` breaks three of its laws (experiments/LOG.md, 2026-11-22).
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._stream, self._foreign = _stream_after(tokenizer, before)
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
        text = self._own(self._stream.push(token_id))
        return self._show(text if self._search is None else self._search.push(text))

    def finish(self) -> str:
        """Return held-back text at the end; bytes that never became a character are U+FFFD."""
        text = self._own(self._stream.finish())
        return self._show(text if self._search is None else self._search.push(text) + self._search.finish())

    def _own(self, text: str) -> str:
        """Drop characters that began in the tokens before and are completed only now."""
        dropped = min(self._foreign, len(text))
        self._foreign -= dropped
        return text[dropped:]

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text


class WholeTextDetokenizer:
    """A detokenizer without stop strings that decodes once, at the end."""

    matched_stop = None

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer, self._before = tokenizer, before
        self._ids: list[int] = []
        self.text = ""

    def push(self, token_id: int) -> str:
        self._ids.append(self._tokenizer.checked_id(token_id))
        return ""

    def finish(self) -> str:
        self.text = self._tokenizer.decode_after(self._before, self._ids)
        return self.text


class TextPlaces:
    """The positions of tokens in the text that follows the tokens `before`: the index of the character with a token's
    first byte, negative if that character begins in `before`. A control token or an id without a token has no text; its
    position is that of the next character. `named`: the text contains the names of control tokens.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), named: bool = False):
        self._tokenizer, self._named = tokenizer, named
        self._stream, foreign = _stream_after(tokenizer, before)
        self._shown = self._place = -foreign

    def push(self, token_id: int) -> int:
        """Return the position of the next token."""
        has_text = self._tokenizer.has(token_id) and (self._named or not self._tokenizer.is_special(token_id))
        place = self._shown + self._stream.characters_before(token_id, has_text)
        self._shown += len(self._stream.push(token_id)) if has_text else 0
        self._place = max(place, self._place)
        return self._place


class _Stream(Protocol):
    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...

    def characters_before(self, token_id: int, has_text: bool) -> int:
        """Return the number of held-back characters that end before this token, if it comes next; a control token has
        no text.
        """
        ...


def _stream_after(tokenizer: Tokenizer, before: Sequence[int]) -> tuple[_Stream, int]:
    """Return a stream that has read the tokens `before`, and the number of their characters that it still holds back.
    """
    stream: _Stream = _WindowStream(tokenizer) if tokenizer.byte_rule is None else _ByteStream(tokenizer)
    context = tokenizer.context(before)
    shown = sum(len(stream.push(id)) for id in context)
    return stream, len(tokenizer.decode(context)) - shown


class _ByteStream:
    """Detokenize with a byte rule: a token adds its bytes, and a character is shown with its last byte."""

    def __init__(self, tokenizer: Tokenizer):
        assert tokenizer.byte_rule is not None
        self._tokenizer, self._front = tokenizer, LeadingStrip(tokenizer.byte_rule)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        pending = self._utf8.getstate()[0]
        # Python waits for a surrogate's third byte, but a surrogate is invalid whatever that byte is.
        if pending[:1] == b"\xed" and pending[1:] >= b"\xa0":
            text += self._utf8.decode(b"", final=True)
        return self._front.strip(text)

    def finish(self) -> str:
        return self._front.strip(self._utf8.decode(b"", final=True))

    def characters_before(self, token_id: int, has_text: bool) -> int:
        pending, more = self._utf8.getstate()[0], self._tokenizer.token_bytes(token_id)[:1] if has_text else b""
        try:
            codecs.getincrementaldecoder("utf-8")().decode(pending + more)
        except UnicodeDecodeError:
            return int(bool(pending))  # the character is incomplete and becomes U+FFFD
        return 0


class _WindowStream:
    """Detokenize with other decoders (WordPiece, Metaspace, none): a token's text is the growth of the decoded window
    of recent tokens.

    The window begins with the tokens shown last, because a token may have another text at the start of a text. With
    these decoders more tokens only lengthen a text.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._known = 0  # number of window tokens with shown text
        self._text = ""  # their text

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id):  # a run of byte tokens is decoded as one, at its end
            return ""
        text = self._tokenizer.decode(self._window, special=True)
        if text.endswith("\ufffd") or not text.startswith(self._text):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._tokenizer.decode(self._window, special=True))

    def characters_before(self, token_id: int, has_text: bool) -> int:
        window = self._tokenizer.decode(self._window, special=True)
        return max(0, len(window.rstrip("\ufffd")) - len(self._text))

    def _advance(self, text: str) -> str:
        new = text[len(self._text) :]
        self._window = self._window[self._known :]
        self._known = len(self._window)
        self._text = self._tokenizer.decode(self._window, special=True)
        return new
