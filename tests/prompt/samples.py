"""The tokenizers and texts that the laws of this folder are held against."""

from __future__ import annotations

from functools import cache

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from experiments import demo_tokenizer
from workbench.prompt.tokenization.tokenizer import Tokenizer

TRAINING = (
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Grüße, naïve café, 日本語のテキスト 🙂🙂 stop the stopping stops\n",
)
SPECIAL = ["<unk>", "<s>", "</s>"]


@cache
def byte_level() -> Tokenizer:
    return Tokenizer(demo_tokenizer.bytes_only())


@cache
def trained() -> Tokenizer:
    """A small byte-level BPE, with an added token that is not special."""
    inner = demo_tokenizer.train(TRAINING, 340)
    inner.add_tokens([AddedToken("été", normalized=False)])
    return Tokenizer(inner)


def sentencepiece_inner() -> tokenizers.Tokenizer:
    """BPE with byte fallback, normalizer, decoder and template as in a Llama 2 folder."""
    letters = ["▁", *"abcdefnoprstu<>|/(){}", "é", "\n"]
    merges = [("▁", "s"), ("▁s", "t"), ("o", "p"), ("▁st", "op"), ("s", "t"), ("a", "b"), ("▁", "▁")]
    entries = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *(a + b for a, b in merges)]
    vocab = {entry: id for id, entry in enumerate(entries)}
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.add_special_tokens(SPECIAL)
    return inner


@cache
def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_inner())


def _with_decoder(decoder) -> Tokenizer:
    inner = sentencepiece_inner()
    inner.decoder = decoder
    return Tokenizer(inner)


@cache
def stripped_bytes() -> Tokenizer:
    """Bytes under a decoder that does more than join them."""
    inner = demo_tokenizer.bytes_only()
    inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return Tokenizer(inner)


@cache
def metaspace() -> Tokenizer:
    return _with_decoder(decoders.Metaspace(prepend_scheme="first"))


@cache
def metaspace_bytes() -> Tokenizer:
    return _with_decoder(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


@cache
def word_suffix() -> Tokenizer:
    """Words end in `</w>`, as in GPT-1: a space for all of them but the last."""
    entries = [*"stop日é.", *(letter + "</w>" for letter in "stop日é.")]
    merges = [("s", "t"), ("o", "p</w>"), ("st", "op</w>")]
    vocab = {entry: id for id, entry in enumerate([*entries, *(a + b for a, b in merges)])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, end_of_word_suffix="</w>"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.BPEDecoder("</w>")
    return Tokenizer(inner)


@cache
def word_piece() -> Tokenizer:
    entries = ["[UNK]", "stop", "##ping", "##s", "the", ".", "##.", "don", "'", "t", "日", "\ufffd"]
    vocab = {entry: id for id, entry in enumerate(entries)}
    inner = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens(["[UNK]"])
    return Tokenizer(inner)


@cache
def bare() -> Tokenizer:
    """No decoder at all: tokens are joined with spaces."""
    inner = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "stop": 3}, unk_token="[UNK]"))
    return Tokenizer(inner)


BY_BYTES = {make.__name__: make for make in (byte_level, trained, sentencepiece)}
BY_WINDOW = {
    make.__name__: make for make in (stripped_bytes, metaspace, metaspace_bytes, word_suffix, word_piece, bare)
}
ALL = BY_BYTES | BY_WINDOW

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
NEAR = st.text(st.sampled_from(list("abst op\n é🙂日�<|>/")), max_size=40)  # so that stop strings are met
WORDS = st.lists(st.sampled_from(["<|end|>", "<s>", "</s>", "stop", " st", "🙂"])).map("".join)
TEXTS = UNICODE | NEAR | WORDS
STOPS = st.lists(
    st.text(st.sampled_from(list("abst op\né🙂日�")), min_size=1, max_size=6)
    | st.sampled_from(["stop", "stopp", "top", "🙂🙂", "st", "\n\n", "<|end|>"]),
    max_size=5,
).map(tuple)


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids at all, texts' own ids, and long runs of broken bytes."""
    anything = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30)
    text = TEXTS.map(tokenizer.encode)
    mixed = st.tuples(text, anything, text).map(lambda parts: [id for part in parts for id in part])
    return anything | text | mixed


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The stop string that starts first, of those that start together the shortest."""
    found = min(((text.find(stop), len(stop), stop) for stop in stops if stop in text), default=None)
    return (found[0], found[2]) if found else None


def longest_beginning(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest end of `text` that begins some stop string."""
    lengths = range(min(len(text), max(map(len, stops), default=0)), 0, -1)
    return next((n for n in lengths if any(len(s) > n and s.startswith(text[-n:]) for s in stops)), 0)
