"""Build byte-level BPE tokenizers from entries and merges, or from ranks of byte strings; pre-tokenizers have the names
of GGUF files.

The patterns are those of each model's own tokenizer.json; names: get_vocab_base_pre in llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from workbench.prompt.tokenization.tokenizer import BYTE_OF

LETTER = {byte: character for character, byte in BYTE_OF.items()}  # GPT-2's byte alphabet

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDING = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{ENDING}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{ENDING}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s|%s"
SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = CASED % (f"{CONTRACTIONS}?", f"{CONTRACTIONS}?", r"\p{N}{1,3}") + SLASHED
TEKKEN = CASED % ("", "", r"\p{N}") + SLASHED
PUNCTUATION = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~]"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    PUNCTUATION + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


@dataclass(frozen=True)
class PreTokenizer:
    """A rule that splits a text into words before merges.

    Args:
        patterns: each splits the pieces of the earlier patterns; the matches are words. Empty: GPT-2's pattern.
        digits: each digit is a word, and GPT-2's pattern splits the rest.
        composed: characters are composed first (Unicode NFC).
        ignore_merges: a word that is a vocabulary entry becomes that token without merges.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    composed: bool = False
    ignore_merges: bool = False

    def steps(self) -> Any:
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns)
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        cuts += [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        return pre_tokenizers.Sequence([*cuts, plain]) if cuts else plain


def _named(names: str, value: PreTokenizer) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), value)


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **_named("gpt-2 phi-2 mpt olmo jais trillion", PreTokenizer()),
    **_named("llama-bpe llama3 llama-v3 falcon3", PreTokenizer((LLAMA3,), ignore_merges=True)),
    **_named("dbrx smaug-bpe chatglm-bpe glm4", PreTokenizer((LLAMA3,))),
    **_named("qwen2 deepseek-r1-qwen", PreTokenizer((QWEN2,), composed=True)),
    **_named("stablelm2 hunyuan megrez grok-2", PreTokenizer((QWEN2,))),
    **_named("starcoder refact smollm codeshell exaone minerva-7b", PreTokenizer(digits=True)),
    "command-r": PreTokenizer(digits=True, composed=True),
    **_named("gpt-4o llama4", PreTokenizer((GPT4O,))),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True),
    **_named("deepseek-v3 hunyuan-dense", PreTokenizer(DEEPSEEK3)),
    **_named("bloom poro-chat gpt3-finnish", PreTokenizer((BLOOM,))),
}


def byte_level_tokenizer(
    entries: Sequence[str],
    merges: Iterable[tuple[str, str]],
    pre: PreTokenizer,
    special: Iterable[int] = (),
    added: Iterable[int] = (),
) -> tokenizers.Tokenizer:
    """Build a byte-level BPE tokenizer.

    Args:
        entries: texts by id, in GPT-2's byte alphabet; special and added tokens as plain text.
        merges: pairs of entries, in order of priority.
        pre: the rule that splits words.
        special: ids of control tokens.
        added: ids of other tokens that are matched anywhere in a text.
    """
    vocab = {entry: id for id, entry in enumerate(entries)}
    inner = tokenizers.Tokenizer(models.BPE(vocab, list(merges), ignore_merges=pre.ignore_merges))
    if pre.composed:
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre.steps()
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(entries[id], special=True, normalized=False) for id in special])
    inner.add_tokens([AddedToken(entries[id], normalized=False) for id in added])
    return inner


def in_byte_alphabet(data: bytes) -> str:
    return "".join(map(LETTER.__getitem__, data))


def merges_of_ranks(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Return the BPE merges that are equivalent to tiktoken's ranks: every pair of entries whose joined bytes have a
    rank, lowest rank first.
    """
    spelled = {data: in_byte_alphabet(data) for data in ranks}
    merges = []
    for data in sorted(ranks, key=ranks.__getitem__):
        pairs = [(data[:cut], data[cut:]) for cut in range(1, len(data))]
        pairs = [(left, right) for left, right in pairs if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spelled[left], spelled[right]) for left, right in pairs]
    return merges
