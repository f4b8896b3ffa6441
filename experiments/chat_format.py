"""Define the tokens of demo-chat's conversations: its tokenizer, and the tokens that it learns to write.

The tokenizer has the demo's entries and cuts text so that copying is easy for a small model: digits one by one, and
words without a mark before them. `json` is then the same tokens in `json.dumps`, `"json.dumps"` and `` `json` ``.

The chat template is the workbench's own (`workbench/prompt/own_template.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from experiments.demo_tokenizer import BEGIN, END, PAD, cut_by, load
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.prompt.own_template import ASSISTANT, SYSTEM, TEMPLATE, THINK, THOUGHT_END, TOOL, TURN, USER

CHAT = BUNDLED_MODELS["demo-chat"]
PIECES = r"(?:\r?\n)+|(?<=\n)[ \t]+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[^\S\r\n]+|\s+"
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": TURN, "pad_token": PAD,
    "model_max_length": 1024, "clean_up_tokenization_spaces": False,
}  # fmt: skip

Segment = tuple[str, bool, bool]  # text, whether it is one control token, whether the model learns to write it


def chat_tokenizer(base: Path) -> Tokenizer:
    """Return the tokenizer in the file `base` with demo-chat's rules for cutting text: the same vocabulary, other
    pieces."""
    return cut_by(PIECES, load(base))


def segments(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], cut_thoughts: bool = False
) -> Iterator[Segment]:
    """Yield the parts of what `TEMPLATE` renders: text, whether it is a control token, and whether the model learns to
    write it. The model writes an assistant's turn except its opening.

    With `cut_thoughts` the end of a thought is not learned: the thought was cut there by force.
    """
    yield BEGIN, True, False
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
    lines = [system] if system else []
    if tools:
        lines.append("Tools:")
    for tool in tools:
        function = tool["function"]
        lines.append(
            f"{function['name']}({', '.join(function['parameters']['properties'])}): {function['description']}"
        )
    if lines:
        yield SYSTEM, True, False
        yield "\n".join(lines), False, False
        yield TURN, True, False
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "user" or role == "tool":
            yield USER if role == "user" else TOOL, True, False
            yield content, False, False
            yield TURN, True, False
        elif role == "assistant":
            yield ASSISTANT, True, False
            if thought := message.get("reasoning_content"):
                yield THINK, True, False
                yield thought, False, True
                yield THOUGHT_END, True, not cut_thoughts
            yield content, False, True
            for call in message.get("tool_calls") or ():
                yield TOOL, True, True
                yield json.dumps(call["function"], ensure_ascii=False), False, True
            yield TURN, True, True


def encode(tokenizer: Tokenizer, parts: Iterator[Segment]) -> tuple[list[int], list[bool]]:
    """Return the token ids of `parts`, and for each id whether the model learns to write it. Texts never become control
    tokens."""
    ids: list[int] = []
    learned: list[bool] = []
    tokenizer.encode_special_tokens = True
    control_ids = {token.content: [id] for id, token in tokenizer.get_added_tokens_decoder().items()}
    for text, control, learns in parts:
        new = control_ids[text] if control else tokenizer.encode(text, add_special_tokens=False).ids
        ids += new
        learned += [learns] * len(new)
    return ids, learned


def save_format(folder: Path, tokenizer: Tokenizer) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` into a model's folder."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "additional_special_tokens": [END]}) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
