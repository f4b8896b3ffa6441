"""Measure a model on the held-out modules in bits a byte, beside xz."""

from __future__ import annotations

import lzma
import math

import torch
import torch.nn.functional as F

from experiments.demo_corpus import SourceFile
from experiments.demo_tokenizer import BEGIN, END
from workbench.engine.runner import Runner
from workbench.progress import Progress


def bits_per_byte(runner: Runner, files: list[SourceFile], progress: bool = True) -> float:
    """Return the code length of all files, each alone from its begin token to its end token, over their bytes.

    Windows have the model's context, half of it new: no token but a file's first is predicted from less than half a
    context.
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
    """Compress all files in one stream by `xz -9e`, and return bits a byte: the figure a model must beat."""
    text = b"".join(file.path.read_bytes() for file in files)
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
