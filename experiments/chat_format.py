"""Define how demo-chat reads a conversation: its tokenizer, its chat template, and which tokens it learns to write.

The tokenizer has the demo's entries and cuts text so that copying is easy for a small model: digits one by one, and
words without a mark before them. `json` is then the same tokens in `json.dumps`, `"json.dumps"` and `` `json` ``.

A turn, once written, always renders as it did when it was new:

    <|begin|><|system|>text and tools<|turn|>
    <|user|>question<|turn|>
    <|assistant|><|think|>thought<|/think|><|tool|>{"name": ..., "arguments": ...}<|tool|>{...}<|turn|>
    <|tool|>result<|turn|><|tool|>result<|turn|>
    <|assistant|>answer<|turn|>

(without the line ends). A thought is optional; where one is asked for (`enable_thinking`), the prompt opens it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

from experiments.demo_tokenizer import BEGIN, END, PAD

CHAT = Path(__file__).resolve().parent.parent / "workbench" / "demo" / "chat"  # the model that ships
PIECES = r"(?:\r?\n)+|(?<=\n)[ \t]+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[^\S\r\n]+|\s+"
SYSTEM, USER, ASSISTANT, TOOL = "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"
THINK, END_THINK, TURN = "<|think|>", "<|/think|>", "<|turn|>"

TEMPLATE = """\
{{- bos_token }}
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' %}
{%- if system or tools %}
{{- '<|system|>' }}{{ system }}
{%- if tools %}
{{- '\\n' if system else '' }}{{ 'Tools:' }}
{%- for tool in tools %}
{{- '\\n' }}{{ tool.function.name }}{{ '(' }}{{ tool.function.parameters.properties | join(', ') }}{{ '): ' }}
{{- tool.function.description }}
{%- endfor %}
{%- endif %}
{{- '<|turn|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|user|>' }}{{ message.content }}{{ '<|turn|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|assistant|>' }}
{%- if message.reasoning_content %}{{ '<|think|>' }}{{ message.reasoning_content }}{{ '<|/think|>' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<|tool|>{"name": ' }}{{ call.function.name | tojson }}{{ ', "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}' }}
{%- endfor %}
{{- '<|turn|>' }}
{%- elif message.role == 'tool' %}
{{- '<|tool|>' }}{{ message.content }}{{ '<|turn|>' }}
{%- elif message.role != 'system' or not loop.first %}
{{- raise_exception('a ' ~ message.role ~ ' message does not belong here') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}{% if enable_thinking %}{{ '<|think|>' }}{% endif %}
{%- endif %}
"""
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": TURN, "pad_token": PAD,
    "model_max_length": 1024, "clean_up_tokenization_spaces": False,
}  # fmt: skip
_JSON_TYPES = {str: "string", float: "number", int: "integer", bool: "boolean"}

Segment = tuple[str, bool, bool]  # text, whether it is one control token, whether the model learns to write it


def chat_tokenizer(base: Path) -> Tokenizer:
    """Return the tokenizer in the file `base` with the cuts of this page: the same entries, other pieces."""
    tokenizer = Tokenizer.from_file(str(base))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def declaration(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a tool's JSON declaration: name, the first line of the docstring, parameters by their type hints.

    To be replaced by the library's own once it has one (issue 17, part 3).
    """
    hints = get_type_hints(function)
    names = list(inspect.signature(function).parameters)
    properties = {name: {"type": _JSON_TYPES[hints[name]]} for name in names}
    parameters = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    described = (inspect.getdoc(function) or "").split("\n", 1)[0]
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": described, "parameters": parameters},
    }


def segments(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], cut_thoughts: bool = False
) -> Iterator[Segment]:
    """Yield what `TEMPLATE` renders, in parts. The model writes all of an assistant's turn but its opening.

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
                yield END_THINK, True, not cut_thoughts
            yield content, False, True
            for call in message.get("tool_calls") or ():
                yield TOOL, True, True
                yield json.dumps(call["function"], ensure_ascii=False), False, True
            yield TURN, True, True


def encode(tokenizer: Tokenizer, parts: Iterator[Segment]) -> tuple[list[int], list[bool]]:
    """Return token ids, and for each whether the model learns to write it. Texts never make a control token."""
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
