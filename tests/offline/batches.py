"""A tiny model whose tokenizer has the control tokens of chats, and batches for it."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.engine.tiny import layer, model_of, runner_of, spec_of
from tests.prompt.samples import byte_level
from workbench.engine.runner import Runner
from workbench.offline.run import BatchProgress, run_batch
from workbench.serve.served_model import ServedModel

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = 48


@cache
def runner() -> Runner:
    changed = {"vocab_size": 266, "max_position_embeddings": CONTEXT}
    spec = spec_of(layer(), eos_token_ids=(1,)).model_copy(update=changed)
    return runner_of(model_of(spec, dtype=torch.float64), tokenizer=byte_level())


def line(name: Any, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def chat(name: str, content: Any, **body: Any) -> dict[str, Any]:
    return line(name, CHAT, messages=[{"role": "user", "content": content}], **body)


# Greedy, seeded and unseeded; several samples; a stop string; logprobs; and lines that fail in every way.
LINES: list[dict[str, Any] | str] = [
    line("one", prompt="stop the", max_tokens=9, temperature=0),
    line("two", prompt="naive", max_tokens=2, temperature=0.9, seed=5),
    "{broken",
    line("three", prompt="abc", n=2, max_tokens=6, logprobs=2),
    line("four", prompt="x" * 60),
    chat("five", "hi", max_tokens=4),
    line("six", prompt="a", temperature=-1),
    line("seven", prompt=[40, 41, 42], stop="e", max_tokens=12),
    line("eight", prompt="b", max_tokens=5, ignore_eos=True),
]


def written(lines: list[Any], path: Path) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def answers(lines: list[Any], folder: Path, **options: Any) -> list[dict[str, Any]]:
    out = folder / "out.jsonl"
    run(written(lines, folder / "in.jsonl"), out, **options)
    return [json.loads(each) for each in out.read_text().splitlines()]


def run(source: Path, out: Path, settings: str = "", **options: Any) -> BatchProgress:
    return run_batch(source, out, lambda: ServedModel("tiny", runner()), settings, **options)


@cache
def whole() -> bytes:
    """The file of a run that nothing stopped."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        run(written(LINES, Path(folder) / "in.jsonl"), out)
        return out.read_bytes()
