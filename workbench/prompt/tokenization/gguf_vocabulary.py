"""Read the tokenizer and the chat template from a GGUF file's metadata.

Keys: gguf-py/gguf/constants.py; meanings: src/llama-vocab.cpp of https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import tokenizers

from workbench.errors import WorkbenchError, nearest
from workbench.prompt.templates import DEFAULT, ChatTemplate
from workbench.prompt.tokenization.byte_level import PRE_TOKENIZERS, byte_level_tokenizer
from workbench.prompt.tokenization.sentencepiece_model import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    USER_DEFINED,
    SentencePieces,
    begin_with,
    check_lengths,
)
from workbench.prompt.tokenization.tokenizer import Tokenizer

KEYS = "tokenizer.ggml"
TEMPLATE_KEY = "tokenizer.chat_template"
WHOLE_KEY = "tokenizer.huggingface.json"  # holds a whole tokenizer.json
TOKEN_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
BEGIN_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")  # byte-level BPE; sentencepiece always does
WITHOUT = ("no_vocab", "none")


@runtime_checkable
class StoredArray(Protocol):
    """A metadata array that is read on demand."""

    def __len__(self) -> int: ...

    def values(self) -> list[Any]: ...


class GGUFVocabulary:
    """The keys `tokenizer.*` of a GGUF file.

    Args:
        metadata: values by key; arrays are `StoredArray`.
        where: the file's name, for error messages.
    """

    def __init__(self, metadata: Mapping[str, Any], where: str):
        self._metadata, self._where = metadata, where

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None where the file has none.

        Raises:
            WorkbenchError: for an unsupported tokenizer model or pre-tokenizer, and for inconsistent arrays.
        """
        if isinstance(whole := self._metadata.get(WHOLE_KEY), str):
            try:
                return Tokenizer(tokenizers.Tokenizer.from_str(whole))
            except Exception as error:  # the library raises bare Exception
                raise WorkbenchError(f"{self._where}: {WHOLE_KEY} is no tokenizer.json ({error})") from None
        kind = self._metadata.get(f"{KEYS}.model")
        if kind is None or kind in WITHOUT:
            return None
        if kind not in ("llama", "gpt2"):
            raise self._refused("model", kind, "llama or gpt2: others are not read")
        entries = self._array("tokens", str)
        kinds = self._array("token_type", int) or [NORMAL] * len(entries)
        if not entries or len(kinds) != len(entries):
            raise WorkbenchError(f"{self._where}: has {len(entries)} tokens and {len(kinds)} token types")
        entries = _made_unique(entries)
        try:
            inner = (self._sentencepiece if kind == "llama" else self._byte_level)(entries, kinds)
        except WorkbenchError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise WorkbenchError(f"{self._where}: its tokenizer cannot be built ({error})") from None
        return Tokenizer(inner, len(entries))

    def chat_template(self, tokenizer: Tokenizer) -> ChatTemplate | None:
        """Return the chat templates, the default and the named ones (`tool_use`); None if the file has none."""
        named = {key.removeprefix(f"{TEMPLATE_KEY}."): text for key, text in self._metadata.items()
                 if key.startswith(f"{TEMPLATE_KEY}.")}  # fmt: skip
        texts = {DEFAULT: self._metadata.get(TEMPLATE_KEY), **named}
        texts = {name: text for name, text in texts.items() if isinstance(text, str)}
        if not texts:
            return None
        ids = {name: self._token_id(key) for name, key in TOKEN_NAMES.items()}
        size = tokenizer.vocab_size  # the keys do not describe a whole tokenizer.json
        names = {name: tokenizer.id_to_token(id) for name, id in ids.items() if id is not None and id < size}
        return ChatTemplate(texts, names, f"{self._where}, {TEMPLATE_KEY}")

    def absent_token_ids(self) -> list[str]:
        """Return `KEY ID` for each special token, except the end token, whose id is outside of the vocabulary:
        converters write such an id for "none".
        """
        names = [name for name in TOKEN_NAMES.values() if name != "eos" and self._token_id(name) is None]
        ids = {f"{name}_token_id": self._metadata.get(f"{KEYS}.{name}_token_id") for name in names}
        return [f"{key} {id}" for key, id in ids.items() if id is not None]

    def _sentencepiece(self, entries: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
        scores = self._array("scores", float)
        if len(scores) != len(entries):
            raise WorkbenchError(f"{self._where}: has {len(entries)} tokens and {len(scores)} scores")
        check_lengths(entries, self._where)
        # User-defined entries are stored with spaces, but the normalizer replaces spaces by marks.
        pieces = [
            entry.replace(" ", SPACE) if kind == USER_DEFINED else entry
            for entry, kind in zip(entries, kinds, strict=True)
        ]
        return SentencePieces(
            pieces,
            scores,
            kinds,
            byte_fallback=BYTE in kinds,
            dummy_prefix=self._flag("add_space_prefix", default=True),
            remove_extra_whitespaces=self._flag("remove_extra_whitespaces", default=False),
            charsmap=bytes(each & 255 for each in self._array("precompiled_charsmap", int)),
            bos_token_id=self._token_id("bos") if self._flag("add_bos_token", default=True) else None,
        ).tokenizer()

    def _byte_level(self, entries: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
        name = self._metadata.get(f"{KEYS}.pre")
        if not isinstance(name, str) or name not in PRE_TOKENIZERS:
            names = ", ".join(PRE_TOKENIZERS)
            raise self._refused("pre", name, f"one of {names}{nearest(str(name), PRE_TOKENIZERS)}")
        merges = []
        for number, merge in enumerate(self._array("merges", str)):
            left, space, right = merge.partition(" ")
            if not space or not left or not right or " " in right:
                raise WorkbenchError(f"{self._where}: {KEYS}.merges, entry {number} is {merge!r}, not two entries")
            merges.append((left, right))
        special = [id for id, kind in enumerate(kinds) if kind == CONTROL]
        added = [id for id, kind in enumerate(kinds) if kind == USER_DEFINED]
        inner = byte_level_tokenizer(entries, merges, PRE_TOKENIZERS[name], special, added)
        begin = self._token_id("bos")
        if begin is not None and self._flag("add_bos_token", default=name in BEGIN_BY_DEFAULT):
            inner.post_processor = begin_with(entries[begin], begin)
        return inner

    def _array(self, key: str, kind: type) -> list[Any]:
        array = self._metadata.get(f"{KEYS}.{key}")
        if array is None:
            return []
        values = array.values() if isinstance(array, StoredArray) else array
        if not isinstance(values, list) or not all(issubclass(each, kind) for each in set(map(type, values))):
            raise WorkbenchError(f"{self._where}: {KEYS}.{key} must be an array of {kind.__name__}")
        return values

    def _flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(f"{KEYS}.{key}", default)
        if not isinstance(value, bool):
            raise self._refused(key, value, "true or false")
        return value

    def _token_id(self, name: str) -> int | None:
        id = self._metadata.get(f"{KEYS}.{name}_token_id")
        if id is None:
            return None
        if not isinstance(id, int) or isinstance(id, bool):
            raise self._refused(f"{name}_token_id", id, "the id of one of its tokens")
        tokens = self._metadata.get(f"{KEYS}.tokens")
        return id if 0 <= id < (2**31 if tokens is None else len(tokens)) else None

    def _refused(self, key: str, value: object, right: str) -> WorkbenchError:
        value_text = "is missing" if value is None else f"is {value!r}"
        return WorkbenchError(f"{self._where}: {KEYS}.{key} {value_text}; it must be {right}")


def _made_unique(entries: list[str]) -> list[str]:
    """Rename repeated entries (padding of a vocabulary) so that all texts are unique and ids stay."""
    if len(set(entries)) == len(entries):
        return entries
    seen: set[str] = set()
    unique = []
    for id, entry in enumerate(entries):
        unique.append(f"{entry}[{id}]" if entry in seen else entry)
        seen.add(entry)
    return unique
