"""Build a tokenizer from a sentencepiece vocabulary: `tokenizer.model`, or the pieces listed in another file.

Source: Kudo and Richardson, 2018; sentencepiece_model.proto of https://github.com/google/sentencepiece
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from workbench.errors import WorkbenchError
from workbench.files import read_bytes
from workbench.prompt.tokenization.kept_merges import keep_merges

MODEL_FILE = "tokenizer.model"
MAX_MODEL_BYTES = 256 << 20
NORMAL, UNKNOWN, CONTROL = 1, 2, 3  # kinds of pieces
USER_DEFINED, UNUSED, BYTE = 4, 5, 6  # more of them
UNIGRAM, BPE = 1, 2  # values of TrainerSpec.model_type
SPACE = "▁"
MAX_PIECE_CHARACTERS = 1000  # the search for merges tries every split of a piece
MANY = 1 << 16  # matches all leading spaces
VARINT, BYTES = 0, 2  # wire types of Protocol Buffers
FIXED64, FIXED32 = 1, 5


@dataclass(frozen=True)
class SentencePieces:
    """A vocabulary and the settings of its normalizer.

    Args:
        pieces: the texts, by id.
        scores: score of each piece; the merge with the highest score goes first.
        kinds: kind of each piece: NORMAL to BYTE.
        algorithm: the segmentation algorithm.
        byte_fallback: characters outside of the vocabulary become byte tokens.
        dummy_prefix: prepend a space to a text.
        remove_extra_whitespaces: strip spaces around a text and collapse repeated spaces.
        charsmap: sentencepiece's compiled table of character replacements; empty for none.
        bos_token_id: the token that the template puts before a text; None for none.
    """

    pieces: list[str]
    scores: list[float]
    kinds: list[int]
    algorithm: Literal["bpe", "unigram"] = "bpe"
    byte_fallback: bool = False
    dummy_prefix: bool = True
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""
    bos_token_id: int | None = None

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Build the tokenizer. Control and unknown pieces become its special tokens."""
        vocab = {piece: id for id, piece in enumerate(self.pieces)}
        unknown = next((id for id, kind in enumerate(self.kinds) if kind == UNKNOWN), None)
        defined = [id for id, kind in enumerate(self.kinds) if kind == USER_DEFINED]
        inner = tokenizers.Tokenizer(self._model(vocab, unknown, bool(defined)))
        if steps := list(self._normalizers()):
            inner.normalizer = normalizers.Sequence(steps)
        if cuts := list(self._cuts(defined)):
            inner.pre_tokenizer = pre_tokenizers.Sequence(cuts)
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if dropped := MANY if self.remove_extra_whitespaces else int(self.dummy_prefix):
            steps.append(decoders.Strip(" ", dropped, 0))
        inner.decoder = decoders.Sequence(steps)
        controls = [piece for piece, kind in zip(self.pieces, self.kinds, strict=True) if kind in (UNKNOWN, CONTROL)]
        inner.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in controls])
        if self.bos_token_id is not None:
            inner.post_processor = begin_with(self.pieces[self.bos_token_id], self.bos_token_id)
        return inner

    def _model(self, vocab: dict[str, int], unknown: int | None, isolated: bool) -> Any:
        if self.algorithm == "unigram":
            # A user-defined piece is matched anywhere; control tokens and bytes are not matched in text.
            most, least = max(0.0, *self.scores), min(0.0, *self.scores) - 1000.0
            score_of = {USER_DEFINED: most, UNKNOWN: least, CONTROL: least, UNUSED: least, BYTE: least}
            scores = [score_of.get(kind, score) for score, kind in zip(self.scores, self.kinds, strict=True)]
            return models.Unigram(list(zip(self.pieces, scores, strict=True)), unknown, self.byte_fallback)
        token = None if unknown is None else self.pieces[unknown]
        return models.BPE(
            vocab,
            keep_merges(self.pieces, self.scores, self.kinds, lambda: self.merges(vocab)),
            unk_token=token,
            fuse_unk=True,
            byte_fallback=self.byte_fallback,
            ignore_merges=isolated,
        )

    def merges(self, ids: dict[str, int]) -> list[tuple[str, str]]:
        """Return all pairs of pieces whose join is a piece, the one with the highest score first; `ids` gives the id of
        each piece.

        Among equal scores (as for runs of spaces) sentencepiece merges the leftmost pair, so a run grows from its left
        end, and the pair with the longest left piece goes first.
        """
        score = self.scores.__getitem__
        normal = [id for id, kind in enumerate(self.kinds) if kind == NORMAL]
        merges: list[tuple[str, str]] = []
        for _, group in groupby(sorted(normal, key=score, reverse=True), score):
            before = len(merges)
            equal = [self.pieces[id] for id in group]
            for piece in equal:
                for cut in range(len(piece) - 1, 0, -1):
                    if (left := piece[:cut]) in ids and (right := piece[cut:]) in ids:
                        merges.append((left, right))
            if len(equal) > 1:
                merges[before:] = sorted(merges[before:], key=lambda pair: (-len(pair[0]), *map(ids.get, pair)))
        return merges

    def _cuts(self, defined: list[int]) -> Iterator[Any]:
        if defined:
            longest_first = sorted((self.pieces[id] for id in defined), key=len, reverse=True)
            yield pre_tokenizers.Split(Regex("|".join(map(_quoted, longest_first))), "isolated")
        if self.algorithm == "unigram":
            # The library's model would match control tokens and bytes as text, so the text is split after their first
            # character. A vocabulary piece across that split is not found.
            names = [
                piece
                for piece, kind in zip(self.pieces, self.kinds, strict=True)
                if kind in (UNKNOWN, CONTROL, UNUSED, BYTE) and len(piece) > 1
            ]
            if names:
                pattern = "|".join(f"{_quoted(name[0])}(?={_quoted(name[1:])})" for name in names)
                yield pre_tokenizers.Split(Regex(pattern), "merged_with_previous")

    def _normalizers(self) -> Iterator[Any]:
        if self.charsmap:
            yield normalizers.Precompiled(self.charsmap)
        if self.remove_extra_whitespaces:
            yield normalizers.Replace(Regex(r"\A +"), "")
            yield normalizers.Replace(Regex(" {2,}"), " ")
        if self.dummy_prefix:
            yield normalizers.Prepend(SPACE)
        yield normalizers.Replace(" ", SPACE)
        if self.remove_extra_whitespaces:
            yield normalizers.Replace(Regex(rf"{SPACE}+\z"), "")


def begin_with(token: str, id: int) -> processors.TemplateProcessing:
    """Return the tokenizer's template (post-processor) that puts a token before a text."""
    return processors.TemplateProcessing(single=[token, "$A"], special_tokens=[(token, id)])


def check_lengths(pieces: list[str], where: Path | str) -> None:
    """Raise WorkbenchError for a piece longer than in any known vocabulary."""
    longest = max(map(len, pieces), default=0)
    if longest > MAX_PIECE_CHARACTERS:
        id = next(id for id, piece in enumerate(pieces) if len(piece) == longest)
        raise WorkbenchError(
            f"{where}: token {id} has {longest:,} characters; at most {MAX_PIECE_CHARACTERS:,} are read"
        )


def read_model_file(path: Path | str) -> SentencePieces:
    """Read a `tokenizer.model`; its tokenizer's template puts the token `<s>` before a text.

    Raises:
        WorkbenchError: for a file that is damaged or not a sentencepiece model, and for unsupported algorithms and
            settings.
    """
    data = memoryview(read_bytes(path, MAX_MODEL_BYTES))
    try:
        return _model(data, path)
    except WorkbenchError:
        raise
    except (struct.error, LookupError, TypeError, ValueError, OverflowError):
        raise WorkbenchError(
            f"{path}: is no sentencepiece model, or damaged; fetch the file again, or save tokenizer.json with "
            "transformers"
        ) from None


def _model(data: memoryview, path: Path | str) -> SentencePieces:
    pieces, scores, kinds = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            pieces.append(str(piece[1], "utf-8"))
            scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            kinds.append(piece.get(3, NORMAL))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if not pieces or len(set(pieces)) < len(pieces):
        raise IndexError
    check_lengths(pieces, path)
    algorithm = trainer.get(3, UNIGRAM)
    refused = {
        "model_type": algorithm if algorithm not in (UNIGRAM, BPE) else None,
        "treat_whitespace_as_suffix": trainer.get(24) or None,
        "escape_whitespaces": None if normalizer.get(5, 1) else 0,
    }
    for name, is_set in refused.items():
        if is_set is not None:
            raise WorkbenchError(f"{path}: {name} is {is_set}, which is not supported: save tokenizer.json instead")
    begin = trainer.get(41, 1)
    return SentencePieces(
        pieces,
        scores,
        kinds,
        algorithm="unigram" if algorithm == UNIGRAM else "bpe",
        byte_fallback=bool(trainer.get(35, 0)),
        dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        charsmap=bytes(normalizer.get(2, b"")),
        bos_token_id=begin if begin < len(pieces) and kinds[begin] == CONTROL else None,
    )


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each field of a message: an int for a varint, else bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise IndexError
        if size > len(data) - at:
            raise IndexError
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise IndexError


def _quoted(text: str) -> str:
    """Quote a text for the regular expressions of `tokenizers` (Oniguruma)."""
    return re.sub(r"([^\w\s▁])", r"\\\1", text, flags=re.ASCII) if text.isascii() else re.escape(text)
