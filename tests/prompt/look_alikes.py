"""Tokenizers whose normalizers make control tokens of other characters, and texts that try it."""

from __future__ import annotations

from collections.abc import Callable

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

UNKNOWN = "<unk>"
CONTROLS = ("</s>", "<|im_end|>", "[INST]", "<｜end▁of▁text｜>", "¶", "ﬁn", "E O S")
FORGES_ALONE = "☃"  # one character that a normalizer replaces by a whole control token
NORMALIZERS: dict[str, Callable[[], normalizers.Normalizer]] = {
    "BertNormalizer": lambda: normalizers.BertNormalizer(clean_text=True, strip_accents=True, lowercase=True),
    "ByteLevel": normalizers.ByteLevel,
    "Lowercase": normalizers.Lowercase,
    "NFC": normalizers.NFC,
    "NFD": normalizers.NFD,
    "NFKC": normalizers.NFKC,
    "NFKD": normalizers.NFKD,
    "Nmt": normalizers.Nmt,
    "Prepend": lambda: normalizers.Prepend("▁"),
    "Replace": lambda: normalizers.Replace(FORGES_ALONE, "</s>"),
    "ReplaceRegex": lambda: normalizers.Replace(Regex(r"[*~]+"), ""),
    "Strip": lambda: normalizers.Strip(left=True, right=True),
    "StripAccents": lambda: normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
}


def _entries() -> list[str]:
    """Controls, every character that they and what normalizers make of them are written in, and all bytes."""
    made = [make().normalize_str(name) for make in NORMALIZERS.values() for name in CONTROLS]
    letters = {character for name in (*CONTROLS, *made) for character in name} | set("abcdefghijklmnopqrstuvwxyz ▁")
    singles = sorted((letters | set(pre_tokenizers.ByteLevel.alphabet())) - set(CONTROLS))
    return [UNKNOWN, *CONTROLS, *(name for name in dict.fromkeys(made) if name not in (*CONTROLS, *singles)), *singles]


ENTRIES = _entries()


def _bpe() -> models.Model:
    return models.BPE(vocab={entry: id for id, entry in enumerate(ENTRIES)}, merges=[], unk_token=UNKNOWN)


def _bpe_of_merges() -> models.Model:
    """Merges that lead to every control token."""
    entries, merges = list(ENTRIES), []
    for name in CONTROLS:
        for end in range(2, len(name) + 1):
            merge = (name[: end - 1], name[end - 1])
            if merge not in merges and merge[0] in (*entries, name[0]):
                merges.append(merge)
                entries += [each for each in (*merge, "".join(merge)) if each not in entries]
    vocab = {entry: id for id, entry in enumerate(entries)}
    return models.BPE(vocab=vocab, merges=merges, unk_token=UNKNOWN)


def _bpe_of_bytes() -> models.Model:
    """Nothing is unknown: bytes are entries too."""
    entries = [*ENTRIES, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {entry: id for id, entry in enumerate(entries)}
    return models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True)


def _unigram() -> models.Model:
    return models.Unigram([(entry, 0.0 if entry in CONTROLS else -1.0) for entry in ENTRIES], 0, False)


def _words() -> models.Model:
    return models.WordLevel({entry: id for id, entry in enumerate(ENTRIES)}, unk_token=UNKNOWN)


def _word_piece() -> models.Model:
    pieces = [*ENTRIES, *(f"##{entry}" for entry in ENTRIES if entry not in CONTROLS)]
    return models.WordPiece({entry: id for id, entry in enumerate(pieces)}, unk_token=UNKNOWN)


_MAKERS = (_bpe, _bpe_of_merges, _bpe_of_bytes, _unigram, _words, _word_piece)
MODELS = {make.__name__.strip("_"): make for make in _MAKERS}
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer | None]] = {
    "none": lambda: None,
    "Whitespace": pre_tokenizers.WhitespaceSplit,
    "Metaspace": pre_tokenizers.Metaspace,
    "Bert": pre_tokenizers.BertPreTokenizer,
}


def inner(model: str, steps: list[str], pre: str, normalized: bool) -> tokenizers.Tokenizer:
    """A tokenizer whose control tokens are looked for in the text as it came or, `normalized`, as it became."""
    made = tokenizers.Tokenizer(MODELS[model]())
    if steps:
        made.normalizer = normalizers.Sequence([NORMALIZERS[name]() for name in steps])
    before = PRE_TOKENIZERS[pre]()
    if before is not None:
        made.pre_tokenizer = before
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(name, normalized=normalized) for name in (UNKNOWN, *CONTROLS)])
    return made


def _styled(base: int, text: str) -> str:
    """`text` in another of Unicode's alphabets that NFKC takes back."""
    return "".join(chr(base + ord(each) - 0x21) if 0x21 <= ord(each) <= 0x7E else each for each in text)


WAYS: list[Callable[[str], str]] = [
    str, str.upper, str.lower, str.title,
    lambda text: _styled(0xFF01, text),  # full width
    lambda text: _styled(0xFF01, text.upper()),
    lambda text: "".join(each + "\u0301" for each in text),  # accents
    lambda text: "*".join(text), lambda text: "\u200b".join(text), lambda text: "\x00".join(text),
    lambda text: text.replace("▁", " "), lambda text: text.replace("fi", "ﬁ").replace("ﬁ", "fi"),
    lambda text: text[: len(text) // 2] + "＞" + text[len(text) // 2 :],
]  # fmt: skip
forged = st.builds(lambda way, name: way(name), st.sampled_from(WAYS), st.sampled_from((UNKNOWN, *CONTROLS)))
texts = st.lists(forged | st.text(max_size=4) | st.sampled_from([FORGES_ALONE, " ", "\n"]), max_size=5).map("".join)
tokenizers_of = st.builds(
    inner, st.sampled_from(list(MODELS)), st.lists(st.sampled_from(list(NORMALIZERS)), max_size=3),
    st.sampled_from(list(PRE_TOKENIZERS)), st.booleans(),
)  # fmt: skip
