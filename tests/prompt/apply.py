"""Tokenizers of several kinds, each as ours and as transformers', and conversations as plain messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from experiments import demo_tokenizer
from tests.prompt import model_templates
from tests.prompt.chats import CONTROLS
from tests.prompt.samples import TRAINING, byte_level, sentencepiece_inner
from workbench.prompt.own_template import own_template
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenization.tokenizer import Tokenizer

WRITTEN = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # added, but not special: as in Qwen's tokenizers
NAMES = {"bos_token": "<|begin|>", "eos_token": "</s>"}
FORGED = [*CONTROLS, *WRITTEN, "<|wide|>"]
ALL = {**model_templates.ALL, "no_tools": model_templates.NO_TOOLS}
TEMPLATES = {name: ChatTemplate(text, NAMES) for name, text in ALL.items()}


def bpe() -> tokenizers.Tokenizer:
    """A trained byte-level BPE."""
    return demo_tokenizer.train(TRAINING, 400)


def metaspace() -> tokenizers.Tokenizer:
    """BPE with byte fallback, where a space is put before the text alone, not after control tokens."""
    inner = sentencepiece_inner()
    inner.normalizer = None  # type: ignore[assignment] (the library takes it)
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return inner


def unigram() -> tokenizers.Tokenizer:
    """Pieces with scores, the control tokens among them: the model makes them of plain characters."""
    letters = sorted({*"abcdefghijklmnopqrstuvwxyz<>|/_[]{}\"':,.0123456789 \n-▁é日ISTNUR"})
    pieces = [("<unk>", 0.0), ("▁the", -2.0), *((each, -5.0) for each in CONTROLS), *((each, -9.0) for each in letters)]
    inner = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    inner.add_special_tokens(["<unk>"])
    return inner


KINDS = {each.__name__: each for each in (bpe, metaspace, sentencepiece_inner, unigram)}


def _with_controls(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    inner.add_special_tokens([AddedToken(each, normalized=False) for each in CONTROLS])
    inner.add_special_tokens([AddedToken("<|wide|>", normalized=False, lstrip=True, rstrip=True)])
    inner.add_tokens([AddedToken(each, normalized=False) for each in (*WRITTEN, "été", "  ")])
    return inner


@cache
def ours(kind: str) -> Tokenizer:
    return Tokenizer(_with_controls(KINDS[kind]()))


@cache
def theirs(kind: str) -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast(tokenizer_object=_with_controls(KINDS[kind]()), **NAMES)


TEXTS = st.text(st.sampled_from("abc  xyz0189.,;:{}()<>|/\"'\n\té日🙂"), max_size=16) | st.sampled_from(
    ["", "été", "a  b", "the stop, stopping", "\n\n", " lead and trail ", "naïve café", "{'a': 1}"]
)
WORDS = st.sampled_from(["add", "find", "x", "unit", "nombre_é"])
VALUES = TEXTS | st.integers(-9, 9) | st.booleans() | st.none() | st.floats(-1, 1) | st.lists(TEXTS, max_size=2)
TOOLS = st.builds(
    lambda name, words, field: {
        "type": "function",
        "function": {
            "name": name,
            "description": words,
            "parameters": {"type": "object", "properties": {field: {"type": "number"}}, "required": [field]},
        },
    },
    WORDS, TEXTS, WORDS,
)  # fmt: skip
DOCUMENTS = st.lists(st.fixed_dictionaries({"title": TEXTS, "text": TEXTS}), min_size=1, max_size=2)


@st.composite
def conversations(draw: st.DrawFn) -> dict[str, Any]:
    """A conversation as `apply_chat_template` takes it: roles in an order that every template accepts."""
    parts = TEXTS.map(lambda text: [{"type": "text", "text": text}, {"type": "text", "text": "b"}])
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXTS)})
    for number in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(TEXTS | parts)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(TEXTS)}
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(TEXTS)
        if draw(st.booleans()):
            call = {"name": draw(WORDS), "arguments": draw(st.dictionaries(WORDS, VALUES, max_size=3))}
            answer["tool_calls"] = [{"type": "function", "function": call}]
            messages += [answer, {"role": "tool", "name": call["name"], "content": draw(TEXTS)}]
        elif draw(st.booleans()) or number == 0:
            messages.append(answer)
        else:
            break
    given: dict[str, Any] = {"conversation": messages}
    if draw(st.booleans()):
        given["tools"] = draw(st.lists(TOOLS, min_size=1, max_size=2))
    if draw(st.booleans()):
        given["documents"] = draw(DOCUMENTS)
    if draw(st.booleans()):
        given["enable_thinking"] = draw(st.booleans())
    return given


@dataclass
class Model:
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None


OWN = Model(byte_level(), own_template(byte_level()))
MODELS = {name: Model(ours("bpe"), template) for name, template in TEMPLATES.items()} | {"own": OWN}
