"""Chat templates in the ways that models' folders write them, and the control tokens that each should write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from workbench.prompt.templates import ROLES
from workbench.prompt.tokenization.tokenizer import Tokenizer

CONTROLS = (
    "<|begin|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>",
    "[INST]", "[/INST]", "</s>",
)  # fmt: skip


def tokenizer(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """One id a byte, after control tokens in the styles of several models."""
    entries = [*CONTROLS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = tokenizers.Tokenizer(models.BPE(vocab={entry: id for id, entry in enumerate(entries)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    if normalizer is not None:
        inner.normalizer = normalizer
    normalized = normalizer is not None
    inner.add_special_tokens([tokenizers.AddedToken(each, normalized=normalized) for each in CONTROLS])
    return Tokenizer(inner)


class Template(NamedTuple):
    text: str
    controls: Callable[[list[dict[str, Any]]], list[str]]


def _im(messages: list[dict[str, Any]]) -> list[str]:
    return ["<|im_start|>", "<|im_end|>"] * len(messages) + ["<|im_start|>"]


def _by_role(messages: list[dict[str, Any]]) -> list[str]:
    """A role may be part of a control token; no other text may."""
    marks = [(f"<|{m['role']}|>" if m["role"] in ROLES else "", "<|end|>") for m in messages]
    return [each for pair in marks for each in pair if each in CONTROLS] + ["<|assistant|>"]


def _inst(messages: list[dict[str, Any]]) -> list[str]:
    return ["<|begin|>"] + [e for m in messages for e in (("[INST]", "[/INST]") if m["role"] == "user" else ("</s>",))]


CHAT_ML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m.content is string %}{{ m.content | trim }}{% elif m.content %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "</tool_call>{% endfor %}{{ m.name or '' }}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (
    "{% set ns = namespace(last=messages|length - 1) %}{% for m in messages[::-1] %}{% set at = messages|length - 1 - "
    "loop.index0 %}{% if m.role == 'user' and not (m.content is string and m.content.startswith('<tool_response>')) %}"
    "{% set ns.last = at %}{% endif %}{% endfor %}{% for m in messages %}{% set content = m.content if m.content is "
    "string else '' %}{% if m.role == 'assistant' and '</think>' in content %}{% set content = "
    "content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MACROS = (
    "{% macro turn(role, text) %}<|im_start|>{{ role }}\n{{ text }}<|im_end|>{% endmacro %}"
    "{% for m in messages %}{% if loop.first or loop.previtem %}{{ turn(m.role, m.content) }}{% endif %}{% endfor %}"
    "{% set end %}<|im_start|>{% endset %}{{ end }}"
)
TEMPLATES = {
    "chat_ml": Template(CHAT_ML, _im),
    "thinking": Template(THINKING, _im),
    "macros": Template(MACROS, _im),
    "by_role": Template(
        "{% for m in messages %}{{ '<|' + m.role + '|>' ~ m.content ~ (m.name or '') ~ '<|end|>' }}{% endfor %}"
        "<|assistant|>", _by_role,
    ),
    "inst": Template(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}", _inst,
    ),
    "bare": Template("{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.name }}{% endfor %}", lambda _: []),
    "changed": Template(
        "{% for m in messages %}{{ m.content | lower | replace('-', '') }}{{ m.name | upper }}{% endfor %}",
        lambda _: [],
    ),
    "keys": Template(
        "{% for m in messages %}{% for key, value in (m.arguments or {}).items() %}<|{{ key }}|>{{ value }}{% endfor %}"
        "{% endfor %}", lambda _: [],
    ),
}  # fmt: skip
FULL_WIDTH = {ord(character): ord(character) - 0x21 + 0xFF01 for character in "<|im_end/s>[]INSTu"}


def _pieces() -> st.SearchStrategy[str]:
    """Control tokens whole, in parts, and in other letters."""
    whole = st.sampled_from(CONTROLS)
    part = st.builds(lambda name, a, b: name[min(a, b) : max(a, b)], whole, st.integers(0, 12), st.integers(0, 12))
    other = whole.map(str.upper) | whole.map(lambda name: name.translate(FULL_WIDTH)) | whole.map("-".join)
    return part | other | whole | st.text(max_size=5) | st.sampled_from(["user", "im_end", "end", "", "-", "\n"])


texts = st.lists(_pieces(), max_size=3).map("".join)
roles = st.sampled_from(["user", "assistant", "system", "tool"]) | texts
calls = st.builds(
    lambda name, arguments: [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    texts, st.dictionaries(texts, texts | st.integers(), max_size=2) | texts,
)  # fmt: skip
messages = st.lists(
    st.fixed_dictionaries(
        {"role": roles},
        optional={
            "content": texts | st.none() | st.lists(st.builds(lambda text: {"type": "text", "text": text}, texts)),
            "name": texts, "tool_calls": calls, "arguments": st.dictionaries(texts, texts, max_size=2),
        },
    ),
    max_size=4,
)  # fmt: skip

WORDS = st.text(st.sampled_from("abc xyz0189.,;:{}()<>|/\"'\n é日"), max_size=12)
ordinary = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": WORDS},
        optional={"name": st.sampled_from(["anna", "bob"])},
    ),
    min_size=1, max_size=6,
)  # fmt: skip
