"""Make the demo's two tokenizers: byte-level BPE trained on the corpus, and single bytes without merges.

Both are `tokenizers` files (`tokenizer.json`), so the Hugging Face ecosystem reads them too.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
# The chat tokens are in the vocabulary from the start, so that later work needs no new embedding rows.
CHAT = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|think|>", "<|/think|>", "<|turn|>")
CONTROL = (BEGIN, END, PAD, *CHAT)

# Line ends, indentation, words with one leading mark, numbers by threes, punctuation, other space.
# A line end never merges with the indentation after it: a prompt may stop right there.
PIECES = (
    r"(?:\r?\n)+|(?<=\n)[ \t]+|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+|[^\S\r\n]+|\s+"
)


def train(texts: Iterable[str], entries: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer of `entries` ids; control tokens have the first ids."""
    tokenizer = _bytes_in_bytes_out(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=list(CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def bytes_only() -> Tokenizer:
    """Make a tokenizer with one id for each byte, after the same control tokens.

    It serves tests, comparison and models without text.
    """
    tokens = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = _bytes_in_bytes_out(Tokenizer(models.BPE(vocab=vocab, merges=[])))
    tokenizer.add_special_tokens(list(CONTROL))
    return tokenizer


def _bytes_in_bytes_out(tokenizer: Tokenizer) -> Tokenizer:
    return cut_by(PIECES, tokenizer)


def cut_by(pieces: str, tokenizer: Tokenizer) -> Tokenizer:
    """Let `tokenizer` cut texts into what the regular expression `pieces` matches, in bytes; return it."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))
