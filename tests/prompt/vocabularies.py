"""Small vocabularies that are trained once a run: byte-level merges, sentencepiece models, and keys of GGUF."""

from __future__ import annotations

import io
import json
from functools import cache
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from tests.prompt.hard_strings import TRAINING
from workbench.prompt.tokenization.byte_level import PRE_TOKENIZERS, byte_level_tokenizer
from workbench.prompt.tokenization.tokenizer import BYTE_OF, Tokenizer

CONTROLS = ["<|begin|>", "<|end|>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
PIECE_KINDS: dict[str, dict[str, Any]] = {
    "bpe as Llama": {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "bpe without a dummy prefix": {
        "model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    },
    "bpe with NFKC": {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc"},
    "bpe with defined symbols": {
        "model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<|mark|>", "\n\n", "(x)"], "control_symbols": ["<ctrl>"],
    },
    "unigram": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc_cf", "vocab_size": 360},
    "unigram as T5": {
        "model_type": "unigram", "vocab_size": 360, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": True,
    },
}  # fmt: skip


@cache
def trained_merges() -> tuple[list[str], list[tuple[str, str]]]:
    """Entries by id and merges of a small vocabulary."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=sorted(BYTE_OF), show_progress=False)
    inner.train_from_iterator(TRAINING * 3, trainer)
    model = json.loads(inner.to_str())["model"]
    entries = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return entries, [tuple(merge) for merge in model["merges"]]


def byte_level(pre: str) -> Tokenizer:
    """Return the small byte-level tokenizer with control tokens at its end and one more entry."""
    entries, merges = trained_merges()
    count, names = len(entries), [*entries, *CONTROLS, "<own>"]
    return Tokenizer(byte_level_tokenizer(names, merges, PRE_TOKENIZERS[pre], (count, count + 1), (count + 2,)))


@cache
def trained_pieces(kind: str) -> bytes:
    """Return a small `tokenizer.model`."""
    import sentencepiece

    model = io.BytesIO()
    fixed = {"vocab_size": 420, "byte_fallback": True, "character_coverage": 0.995, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for _ in range(4) for line in TRAINING]),
        model_writer=model,
        **{**fixed, **PIECE_KINDS[kind]},
    )
    return model.getvalue()


def gguf_byte_level(pre: str) -> dict[str, Any]:
    """Return the small byte-level vocabulary as metadata of a GGUF file."""
    entries, merges = trained_merges()
    return {
        "model": "gpt2", "pre": pre, "tokens": [*entries, *CONTROLS, "<own>"],
        "token_type": [1] * len(entries) + [3, 3, 4], "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": len(entries), "eos_token_id": len(entries) + 1, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip
