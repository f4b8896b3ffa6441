"""Encode and decode text with a Hugging Face `tokenizer.json`; map tokens to bytes by its decoder."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import index
from pathlib import Path

import tokenizers
from tokenizers import pre_tokenizers

from workbench.errors import WorkbenchError
from workbench.files import UnreadableText, read_bytes

FILE = "tokenizer.json"
MAX_BYTES = 256 << 20  # ten times the largest known vocabulary
CONTEXT_TOKENS = 8  # context tokens before a text, without a byte rule
FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # an entry for a single byte


@dataclass(frozen=True)
class ByteRule:
    """A decoder that concatenates the bytes of the tokens and strips some leading spaces.

    `alphabet`: the vocabulary is written in GPT-2's byte alphabet. Otherwise it is written as in sentencepiece, with
    `replacements` (`▁` for a space) and, with `fallback`, entries like `<0x0A>` for single bytes.
    """

    alphabet: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    fallback: bool = False
    strip: str = " "  # the character dropped from the front of a text,
    strip_count: int = 0  # at most this many times

    def token_bytes(self, token: str, added: bool) -> bytes:
        """Return the bytes of the vocabulary's entry `token`; `added` entries are not in the byte alphabet."""
        if self.alphabet:
            is_spelled = not added and all(character in BYTE_OF for character in token)
            return bytes(BYTE_OF[character] for character in token) if is_spelled else token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        byte = FALLBACK.fullmatch(token) if self.fallback else None
        return bytes([int(byte[1], 16)]) if byte else token.encode()


class LeadingStrip:
    """A filter that strips leading characters, as a byte rule says, from a text that arrives in pieces."""

    def __init__(self, rule: ByteRule):
        self._character, self._left = rule.strip, rule.strip_count

    def strip(self, piece: str) -> str:
        while self._left and piece:
            if piece[0] == self._character:
                piece, self._left = piece[1:], self._left - 1
            else:
                self._left = 0
        return piece


def parse_byte_rule(decoder: Mapping | None) -> ByteRule | None:
    """Return the byte rule that the decoder of a `tokenizer.json` describes; None if a token's text depends on other
    tokens.
    """
    if decoder is None:
        return None
    steps = list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteRule(alphabet=True)
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    fallback = _take(steps, "ByteFallback") is not None
    fused = _take(steps, "Fuse") is not None
    strip = _take(steps, "Strip") if fused else None
    if steps or not fused or (strip and strip["stop"]):
        return None
    if strip is None:
        return ByteRule(replacements=tuple(replacements), fallback=fallback)
    return ByteRule(False, tuple(replacements), fallback, strip["content"], strip["start"])


def _take(steps: list[Mapping], kind: str) -> Mapping | None:
    return steps.pop(0) if steps and steps[0]["type"] == kind else None


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet: a printable byte is its own character, other bytes are U+0100 and up, in order."""
    printable = {ord(c): c for c in pre_tokenizers.ByteLevel.alphabet() if ord(c) < 256}
    others = [byte for byte in range(256) if byte not in printable]
    return {c: byte for byte, c in printable.items()} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A tokenizer. Control tokens are those that the file marks as special: they have a name and no text.

    `vocab_size` is one more than the highest id: the least number of rows of an embedding. `special_token_ids` has the
    control tokens' ids by name, `added_token_ids` the ids of tokens that are matched anywhere in a text. `unknown_id`
    is the token for characters outside of the vocabulary, `plain_special_token` the name of a control token that
    matches no spaces around it. `bos_token_ids` are the tokens that the file's template puts before a text (Llama's
    `<s>`); `encode` does not add them. `byte_rule` maps tokens to bytes; None for other kinds of decoder. The tokenizer
    owns `inner` and changes its settings, so no other code may use it.
    """

    def __init__(self, inner: tokenizers.Tokenizer, vocab_size: int | None = None):
        inner.no_truncation()  # files contain settings from training (truncation, padding)
        inner.no_padding()
        inner.encode_special_tokens = True
        added = inner.get_added_tokens_decoder()
        self._inner = inner
        self._lock = threading.Lock()  # the reading of control tokens is a setting of the inner tokenizer
        self._added = frozenset(added)
        plain = (each for _, each in sorted(added.items()) if each.special and not _has_flags(each))
        self.plain_special_token = next((each.content for each in plain), None)
        self.added_token_ids = {token.content: id for id, token in sorted(added.items()) if not token.special}
        self._controls = {id: token.content for id, token in added.items() if token.special}
        self._bytes: dict[int, bytes] = {}  # cached bytes of tokens; computing them again takes far longer
        self.special_token_ids = {name: id for id, name in sorted(self._controls.items())}
        self.vocab_size = vocab_size or max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        decoder = json.loads(inner.decoder.__getstate__()) if inner.decoder else None
        self.byte_rule: ByteRule | None = parse_byte_rule(decoder)
        self.bos_token_ids = self._template_before()
        self.unknown_id = _unknown_id(inner)

    @classmethod
    def from_folder(cls, folder: Path | str) -> Tokenizer | None:
        """Load the tokenizer of a model's folder; None if it has no `tokenizer.json`."""
        path = Path(folder) / FILE
        return cls.from_file(path) if path.exists() else None

    @classmethod
    def from_file(cls, path: Path | str) -> Tokenizer:
        try:
            text = read_bytes(path, MAX_BYTES).decode("utf-8")
        except UnreadableText as error:
            if not Path(path).exists():
                raise WorkbenchError(f"{path}: no such file; name a Hugging Face {FILE}") from None
            raise _unreadable(path, error.reason) from None
        except UnicodeDecodeError as error:
            raise _unreadable(path, error) from None
        try:
            return cls(tokenizers.Tokenizer.from_str(text))
        except Exception as error:  # the library raises bare Exception
            raise _unreadable(path, error) from error

    def to_json(self) -> str:
        """Return the text of a `tokenizer.json` that `from_file` reads as this tokenizer."""
        return self._inner.to_str()

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of `text`, with nothing put before or after it.

        Names of control tokens in the text are plain characters, so no prompt can forge a turn; with `special` they
        become control tokens. The token for unknown characters is used either way.

        Raises:
            WorkbenchError: for a lone surrogate, and for characters that can only be encoded as a control token.
        """
        if special:
            return self.encode_with_offsets(text)[0]
        with self._reading(text, special=False):
            return self._plain(text)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return (ids of `text`, as `encode(text, special=True)` returns them; range of characters [first, last) of
        each).
        """
        with self._reading(text, special=True):
            encoding = self._inner.encode(text, add_special_tokens=False)
            return encoding.ids, encoding.offsets

    @contextmanager
    def _reading(self, text: str, special: bool) -> Iterator[None]:
        """Check `text` and lock the inner tokenizer during encoding, with control tokens enabled or not."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            surrogate = f"U+{ord(text[error.start]):04X}"
            raise WorkbenchError(
                f"text, character {error.start}: the lone surrogate {surrogate} is no character; "
                "read the text as UTF-8, or replace it with text.encode('utf-8', 'replace').decode()"
            ) from None
        with self._lock:
            self._inner.encode_special_tokens = not special
            try:
                yield
            except WorkbenchError:
                raise
            except Exception as error:  # the library raises bare Exception
                raise WorkbenchError(f"this tokenizer cannot encode the text: {error}") from error

    def _plain(self, text: str) -> list[int]:
        """Return the ids of `text`, none of them a control token's.

        The library ignores control tokens only in its search for added tokens. A model may also have them as ordinary
        entries (Unigram), and a normalizer may produce them from other characters (full-width `</s>`, `</S>`). Such a
        text is split within the match, and its parts are encoded one by one.
        """
        ids: list[int] = []
        parts = [(0, len(text))]
        while parts:
            first, last = parts.pop()
            encoding = self._inner.encode(text[first:last], add_special_tokens=False)
            cuts = self._cuts(text, first, last, encoding)
            if cuts:
                parts += reversed(list(pairwise((first, *cuts, last))))
            else:
                ids += encoding.ids
        return ids

    def _cuts(self, text: str, first: int, last: int, encoding: tokenizers.Encoding) -> list[int]:
        """Return the positions to split [first, last) of `text` so that it gives no control token; WorkbenchError if
        impossible.
        """
        if self._controls.keys().isdisjoint(encoding.ids):
            return []
        cuts: set[int] = set()
        for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            name, start, end = self._controls.get(id), first + start, first + end
            if name is None or (id == self.unknown_id and not self.spells(text[start:end], name)):
                continue
            edges = {start + 1} if end - start > 1 else {start, end}
            edges = {cut for cut in edges if first < cut < last}
            if not edges or start == end:
                raise WorkbenchError(
                    f"text, characters {start} to {end} ({text[start:end]!r}): this tokenizer can only read them as "
                    f"its control token {name!r}; take them out"
                )
            cuts |= edges
        return sorted(cuts)

    def spells(self, text: str, name: str) -> bool:
        """Return whether `text` spells `name`, and is not just characters outside of the vocabulary."""
        normalizer = self._inner.normalizer
        return len(text) > 1 and name in (text, text if normalizer is None else normalizer.normalize_str(text))

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Return the text of `ids`, without control tokens unless `special`.

        Bytes that are not UTF-8 become U+FFFD as with Python's `errors="replace"`; the library `tokenizers` would
        replace a whole run of sentencepiece bytes for a single invalid one.
        """
        shown = [id for id in map(self.checked_id, ids) if special or id not in self._controls]
        if self.byte_rule is None:
            return self._inner.decode(shown, skip_special_tokens=False)
        text = b"".join(self.token_bytes(id) for id in shown).decode("utf-8", "replace")
        return LeadingStrip(self.byte_rule).strip(text)

    def decode_after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text of `ids` after the tokens `before`: decode(before + ids)[len(decode(before)):]."""
        start = self.context(before)
        return self.decode([*start, *ids])[len(self.decode(start)) :]

    def context(self, ids: Sequence[int]) -> list[int]:
        """Return the last of `ids` that have text, as many as can affect how following tokens are decoded.

        A byte rule strips only the front of a text, and a character has at most four bytes; other decoders look at a
        token's neighbours and at a whole run of byte tokens.
        """
        context: list[int] = []
        size, rule = 0, self.byte_rule
        for id in reversed(ids):
            if id in self._controls or not 0 <= id < self.vocab_size:
                continue
            context.append(id)
            size += 1 if rule is None else len(self.token_bytes(id))
            if size >= (CONTEXT_TOKENS if rule is None else 4 * (1 + rule.strip_count)) and not self.is_byte(id):
                break
        return context[::-1]

    def is_byte(self, id: int) -> bool:
        """Return whether a token stands for a single byte (`<0x0A>`) in a tokenizer without a byte rule."""
        return self.byte_rule is None and FALLBACK.fullmatch(self.id_to_token(id)) is not None

    def id_to_token(self, id: int) -> str:
        """Return the vocabulary's entry of a token (`Ġdef`, `▁the`, `<0x0A>`); empty if the id has none."""
        return self._inner.id_to_token(self.checked_id(id)) or ""

    def token_bytes(self, id: int) -> bytes:
        """Return the exact bytes of one token; for a control token, the bytes of its name. They are empty if the id has
        no entry.

        Without a byte rule these are the bytes of the token decoded alone.
        """
        found = self._bytes.get(id)
        if found is None:
            number = self.checked_id(id)
            token = self.id_to_token(number)
            if self.byte_rule is None:
                found = self._inner.decode([number], skip_special_tokens=False).encode()
            else:
                found = self.byte_rule.token_bytes(token, number in self._added)
            self._bytes[number] = found
        return found

    @cached_property
    def max_token_characters(self) -> int:
        """Return the maximum number of characters of a text that one token can stand for."""
        if self._inner.normalizer is not None or self.unknown_id is not None:  # these may drop or join characters
            return 1 << 62
        return max(map(len, self._inner.get_vocab(with_added_tokens=True)), default=1)

    def exact_text(self, ids: Iterable[int]) -> str | None:
        """Return the exact text of `ids`, with the names of control tokens and all spaces; None if it ends within a
        character.
        """
        if self.byte_rule is None:
            return self.decode(ids, special=True)
        try:
            return b"".join(map(self.token_bytes, ids)).decode("utf-8")
        except UnicodeDecodeError:
            return None

    def is_special(self, id: int) -> bool:
        return id in self._controls

    def has(self, id: int) -> bool:
        """Return whether a token has this id: a model's embedding may have more rows, as padding."""
        return 0 <= id < self.vocab_size

    def checked_id(self, id: int) -> int:
        """Return `id` as an int; WorkbenchError outside of [0, vocab_size)."""
        if not 0 <= (number := index(id)) < self.vocab_size:
            raise WorkbenchError(f"token id {number} is out of range: this tokenizer's are 0 to {self.vocab_size - 1}")
        return number

    def check_vocab_size(self, vocab_size: int) -> None:
        """Raise WorkbenchError if a model's embedding with `vocab_size` rows is too small for the ids."""
        if self.vocab_size > vocab_size:
            raise WorkbenchError(
                f"a tokenizer that does not match the vocabulary: its ids go to {self.vocab_size - 1}, "
                f"the model's embedding ends at {vocab_size - 1}; use the {FILE} that was saved with this model"
            )

    def _template_before(self) -> tuple[int, ...]:
        encoding = self._inner.encode("a", add_special_tokens=True)
        before = encoding.special_tokens_mask.index(0) if 0 in encoding.special_tokens_mask else 0
        return tuple(id for id in encoding.ids[:before] if id < self.vocab_size)  # a file can name an id without entry

    def __repr__(self) -> str:
        kind = "windowed" if self.byte_rule is None else "byte-level" if self.byte_rule.alphabet else "sentencepiece"
        return f"Tokenizer({kind}, vocab={self.vocab_size}, control={len(self._controls)})"


def _has_flags(token: tokenizers.AddedToken) -> bool:
    return token.lstrip or token.rstrip or token.single_word or token.normalized


def _unknown_id(inner: tokenizers.Tokenizer) -> int | None:
    """Return the id for characters outside of the vocabulary."""
    model = inner.model
    if hasattr(model, "unk_token"):
        return None if model.unk_token is None else inner.token_to_id(model.unk_token)
    return json.loads(model.__getstate__()).get("unk_id")


def _unreadable(path: Path | str, error: Exception | str) -> WorkbenchError:
    reason = " ".join(str(error).split())
    return WorkbenchError(f"{path}: no readable tokenizer ({reason}); copy {FILE} anew from the model's source")
