"""Requests for structured output, and runners of a tiny model that has a tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tests.engine.tiny import layer, model_of, runner_of
from tests.prompt.samples import byte_level, trained
from workbench.engine.runner import Runner
from workbench.model.spec import ModelSpec
from workbench.request import Request, SamplingParameters
from workbench.response_format import Choices, JSONSchema, Lark, Regex, ResponseFormat
from workbench.trace.events import Finished

CONTEXT = 96
TREE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
        "kind": {"enum": ["leaf", "branch", None]},
        "below": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMATS: dict[str, ResponseFormat] = {
    "tree": JSONSchema(json_schema=TREE),
    "compact": JSONSchema(json_schema=TREE, max_whitespace=0),
    "any": JSONSchema(json_schema=True),
    "numbers": JSONSchema(json_schema={"type": "array", "items": {"type": "number"}, "minItems": 2}),
    "choices": Choices(choices=("yes", "no", "yesterday", "<|end|>", "née 🙂")),
    "regex": Regex(regex=r"[a-z]{2,} [0-9]{3}(-[^a]*END)?"),  # Rust's \d has digits that Python does not know
    "lark": Lark(lark='start: e\ne: "(" e ")" | e "+" e | /[0-9]+/'),
    "control": Lark(lark='start: <|tool|> %json {"type": "object", "required": ["a"]} <|turn|>'),
}


def spec_of(eos: tuple[int, ...] = (), vocab: int = 266) -> ModelSpec:
    return ModelSpec(
        name="tiny", vocab_size=vocab, hidden_size=8, layers=(layer(), layer()), max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, eos_token_ids=eos,
    )  # fmt: skip


@cache
def model(eos: tuple[int, ...] = (), vocab: int = 266, seed: int = 0):
    return model_of(spec_of(eos, vocab), seed, dtype=torch.float64)


def runner(eos: tuple[int, ...] = (), words: bool = False, **more: Any) -> Runner:
    tokenizer = trained() if words else byte_level()
    sizes = {"pages": 120, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return runner_of(model(eos, tokenizer.vocab_size + 3), tokenizer=tokenizer, **{**sizes, **more})


def ask(name: str, wanted: str | ResponseFormat, most: int = 60, prompt: str = "a = ", **sampling: Any) -> Request:
    form = FORMATS[wanted] if isinstance(wanted, str) else wanted
    parameters = SamplingParameters(response_format=form, max_tokens=most, **{"temperature": 0, **sampling})
    return Request(name, tuple(byte_level().encode(prompt)), parameters)


def result(ends: dict[str, Finished]) -> dict[str, tuple]:
    return {name: (end.token_ids, end.reason, end.ended_by, end.output_text) for name, end in ends.items()}


@cache
def RUNNERS(eos: tuple[int, ...]) -> Runner:
    return runner(eos)
