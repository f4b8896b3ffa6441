"""Peers that need nothing installed."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.agreement import LogitsReference
from benchmarks.peers.catalog import SCRIPTS, Peer
from benchmarks.peers.process import run_script
from tests.patience import limit
from workbench.model.shapes import named_shape

SCRIPT = Path(__file__).resolve().parent / "fake_peer.py"
TINY = named_shape("tiny")


@functools.cache
def reference(formats: tuple[str, ...] = ("float32", "bfloat16")) -> LogitsReference:
    return LogitsReference(TINY, 0, formats)


def right_logits() -> list[float]:
    return reference().exact["bfloat16"].tolist()


def fake(name: str, note: Path, formats: tuple[str, ...] = ("bfloat16",), **options: Any) -> Peer:
    """`note` is a file in which every measurement leaves a line."""
    options = {"name": name, "note": str(note), "logits": right_logits(), **options}
    return Peer(
        name, "transformers", str(SCRIPT), "none", formats, ("torch", "no-such-distribution"), f"pip install {name}",
        options=options, environment={"PYTHONPATH": str(SCRIPTS)},
    )  # fmt: skip


def noise() -> list[float]:
    return torch.randn(TINY.vocab_size, generator=torch.Generator().manual_seed(3)).tolist()


def run(tmp_path: Path, timeout: float | None = None, python: str = sys.executable, **options: Any) -> dict:
    peer = fake("fake", tmp_path / "note", **options)
    requests = [{"prompt": [1, 2, 3], "output_tokens": 5}]
    job = {"peer": "fake", "format": "bfloat16", "model": "/some/where/model", "options": dict(peer.options)}
    return run_script(
        python, str(SCRIPT), {**job, "kind": "decode", "repetitions": [requests] * 3}, threads=1,
        packages=peer.packages, timeout=timeout or limit(30), environment=peer.environment,
    )  # fmt: skip
