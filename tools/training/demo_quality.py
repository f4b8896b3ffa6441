"""Measure a model on the held-out modules in bits per byte, and xz on the same files."""

from __future__ import annotations

import lzma
import math

import torch
import torch.nn.functional as F

from experiments.demo_tokenizer import BEGIN, END
from tools.training.demo_corpus import SourceFile
from workbench.engine.runner import Runner
from workbench.progress import Progress


def bits_per_byte(runner: Runner, files: list[SourceFile], progress: bool = True) -> float:
    """Return the code length of all files in bits per byte, each file scored alone from its begin token to its end
    token.

    Windows have the model's context length and overlap by half, so that every token except a file's first ones is
    predicted from at least half a context.
    """
    tokenizer, context = runner.tokenizer, runner.model.spec.max_position_embeddings
    assert tokenizer is not None
    begin, end = tokenizer.special_token_ids[BEGIN], tokenizer.special_token_ids[END]
    nats, size = 0.0, 0
    for file in Progress(files, desc="bits a byte", unit="file", disable=not progress):
        text = file.text()
        size += len(text.encode())
        ids = torch.tensor([begin, *tokenizer.encode(text), end])
        known = 1  # the begin token is given
        for start in range(0, len(ids) - 1, context // 2):
            window = ids[start : start + context + 1]
            losses = F.cross_entropy(runner.model.logits(window[:-1]), window[1:], reduction="none")
            nats += losses[known - start - 1 :].double().sum().item()
            known = start + len(window)
            if known == len(ids):
                break
    return nats / math.log(2) / size


def xz_bits_per_byte(files: list[SourceFile]) -> float:
    """Compress all files in one stream with `xz -9e`, and return bits per byte: the figure that a model must beat."""
    text = b"".join(file.path.read_bytes() for file in files)
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
