"""A tiny model that says what a test wants: a filter leaves one token at each place of each answer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.engine.tiny import layer, model_of, runner_of
from tests.prompt.samples import byte_level
from workbench.engine.runner import Runner
from workbench.model.spec import ModelSpec
from workbench.request import CustomPart
from workbench.sampling.filters import History

Json = dict[str, Any]
CONTROLS = byte_level().special_token_ids
_SCRIPTS: dict[str, list[list[int]]] = {}
_NAMES = itertools.count()


class Scripted:
    """The filter: answer n of a conversation is text n of the script, the last one for all that follow."""

    def __init__(self, name: str):
        self.answers = _SCRIPTS[name]

    def __call__(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        left = logits.clone()
        for row, history in zip(left, histories, strict=True):
            number = list(history.prompt_ids).count(CONTROLS["<|assistant|>"]) - 1
            answer = self.answers[min(number, len(self.answers) - 1)]
            place = len(history.output_ids)
            token = answer[place] if place < len(answer) else CONTROLS["<|turn|>"]
            if torch.isfinite(row[token]):  # a grammar may forbid it
                row[:] = -torch.inf
                row[token] = 0.0
        return left


def script(*answers: str) -> Json:
    """Return sampling parameters under which a model gives these answers, control tokens by name."""
    name = f"script-{next(_NAMES)}"
    _SCRIPTS[name] = [byte_level().encode(each, special=True) for each in answers]
    part = CustomPart(path="tests.agents.script:Scripted", arguments={"name": name})
    return {"temperature": 1.0, "filters": (part,), "max_tokens": 400}


@cache
def model(context: int = 4096, seed: int = 0):
    spec = ModelSpec(
        name="tiny", vocab_size=266, hidden_size=8, layers=(layer(),), max_position_embeddings=context,
        tie_word_embeddings=True, eos_token_ids=(CONTROLS["<|end|>"],),
    )  # fmt: skip
    return model_of(spec, seed)


def runner(context: int = 4096, **settings: Any) -> Runner:
    sizes = {"prefix": "radix", "pages": 2 * context // 4, "max_num_batched_tokens": 512}
    return runner_of(model(context), tokenizer=byte_level(), **{**sizes, **settings})


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def say() -> None:
    """Print."""
    print("printed words")


def call(name: str, /, **arguments: Any) -> str:
    return "<|tool|>" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def pages_in_use(runner: Runner) -> int:
    """Return pages that a sequence holds; those that the prefix cache alone keeps are not among them."""
    return sum(pool.num_used for pool in runner.kv_cache.manager.pools)
