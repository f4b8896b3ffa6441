"""Run the vendors' own clients against a server in a process of its own: two rounds of tools in three protocols, under
the templates of eight models and with tools of every shape, and completions with offsets, echo and log-probabilities.

`python -m tests.serve.clients [WORDS]` prints a line for each scenario, or for those that have a word in their names.
The weights are demo-chat's; calls are forced, so that what a call says is decided by its schema and by the form in
which the template writes calls.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai

from tests.patience import limit
from tests.prompt import model_templates
from tests.serve.strangers import CHAT, serving
from workbench.agents.arguments import find_fault

Json = dict[str, Any]
CONTROLS = ("<|user|>", "<|turn|>", "<|tool|>", "<|pad|>")  # of demo-chat, and what they are called in others
CHAT_ML, LLAMA, MISTRAL = (
    ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    ("<|im_start|>", "<|im_end|>", "<|python_tag|>", "<|eom_id|>"), ("[INST]", "</s>", "[TOOL_CALLS]", "[ARGS]"),
)  # fmt: skip
TEMPLATES: dict[str, tuple[str, Sequence[str]]] = {
    "demo-chat": ("", CONTROLS), "qwen2.5": (model_templates.TOOLS_AS_JSON, CHAT_ML),
    "qwen3-coder": (model_templates.IN_FUNCTION_TAGS, CHAT_ML), "glm": (model_templates.IN_KEY_TAGS, CHAT_ML),
    "llama3": (model_templates.BARE, LLAMA), "mistral": (model_templates.SHORT_IDS, MISTRAL),
    "mistral-named": (model_templates.NAMED, MISTRAL), "smollm2": (model_templates.NO_TOOLS, CHAT_ML),
}  # fmt: skip
NUMBER, WORD = {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "enum": ["day", "week"]}
CLOSED = {"type": "object", "properties": {"n": NUMBER, "unit": WORD}, "required": ["n"], "additionalProperties": False}
A, B = ({**CLOSED, "properties": {"n": NUMBER, "kind": {"const": kind}}, "required": ["kind"]} for kind in "ab")
ANNOTATED = {**NUMBER, "example": 1, "format": "int32", "nullable": True, "x-order": 1}
SHAPES: dict[str, Json] = {  # what a declaration has beside its description
    "plain": {"parameters": CLOSED},
    "anyOf": {"parameters": {"type": "object", "anyOf": [A, B]}},
    "oneOf": {"parameters": {"type": "object", "oneOf": [A, B], "discriminator": {"propertyName": "kind"}}},
    "allOf": {"parameters": {"allOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": CLOSED}}},
    "$ref": {"parameters": {"type": "object", "$ref": "#/$defs/p", "$defs": {"p": CLOSED}}},
    "annotations": {"parameters": {**CLOSED, "properties": {"n": ANNOTATED}, "propertyNames": {"type": "string"}}},
    "absent": {}, "null": {"parameters": None}, "{}": {"parameters": {}},
    "a long name": {"name": "n" * 100, "parameters": CLOSED},
}  # fmt: skip
QUESTION: Any = {"role": "user", "content": "How many days?"}
ELSEWHERE = "toolu_01A09q90qw90lq917835lq9"  # an id that another server made


def check(tool: Json, name: str, arguments: Json) -> None:
    """Assert that a call is of the tool, with arguments as it declares them."""
    fault = find_fault(arguments, tool.get("parameters") or {"additionalProperties": False})
    assert (name, fault) == (tool["name"], ""), (name, arguments, fault)


def chat(client: openai.OpenAI, model: str, tool: Json, streams: bool) -> Any:
    """A forced call, its result under its id or another server's, and an answer."""
    asked: Any = [{"role": "system", "content": "Be brief.", "name": "ops"}, {**QUESTION, "name": "anna"}]
    given: Any = {"model": model, "tools": [{"type": "function", "function": tool}], "max_tokens": 128}
    given["parallel_tool_calls"] = False  # OpenAI's client reads no stream that ends by its length
    if streams:
        with client.chat.completions.stream(messages=asked, tool_choice="required", **given) as stream:
            message: Any = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(messages=asked, tool_choice="required", **given).choices[0].message
    called = message.tool_calls[0].function
    check(tool, called.name, json.loads(called.arguments))
    id = ELSEWHERE if streams else message.tool_calls[0].id
    call = {"id": id, "type": "function", "function": {"name": called.name, "arguments": called.arguments}}
    asked += [{"role": "assistant", "content": None, "tool_calls": [call], "name": "bot"}]
    asked += [{"role": "tool", "tool_call_id": id, "content": "3"}]
    return client.chat.completions.create(messages=asked, **{**given, "max_tokens": 3}).choices[0].finish_reason


def messages(client: anthropic.Anthropic, model: str, tool: Json, streams: bool) -> Any:
    schema = tool.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [{"name": tool["name"], "description": tool["description"], "input_schema": schema}]
    asked: list[Any] = [QUESTION]
    given: Any = {"model": model, "max_tokens": 128, "tools": tools}
    if streams:
        with client.messages.stream(messages=asked, tool_choice={"type": "any"}, **given) as stream:
            found: Any = stream.get_final_message()
    else:
        found = client.messages.create(messages=asked, tool_choice={"type": "any"}, **given)
    use = next(block for block in found.content if block.type == "tool_use")
    check(tool, use.name, use.input)
    id = ELSEWHERE if streams else use.id
    asked += [{"role": "assistant", "content": [{"type": "tool_use", "id": id, "name": use.name, "input": use.input}]}]
    asked += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "3"}]}]
    return client.messages.create(messages=asked, **{**given, "max_tokens": 3}).stop_reason


def responses(client: openai.OpenAI, model: str, tool: Json, streams: bool) -> Any:
    tools: Any = [{"type": "function", "parameters": None, **tool}]
    given: Any = {"model": model, "tools": tools, "max_output_tokens": 128, "parallel_tool_calls": False}
    if streams:
        with client.responses.stream(input=[QUESTION], tool_choice="required", **given) as stream:
            found: Any = stream.get_final_response()
    else:
        found = client.responses.create(input=[QUESTION], tool_choice="required", **given)
    call = next(item for item in found.output if item.type == "function_call")
    check(tool, call.name, json.loads(call.arguments))
    id = ELSEWHERE if streams else call.call_id
    said: Any = {"type": "function_call", "call_id": id, "name": call.name, "arguments": call.arguments}
    result: Any = {"type": "function_call_output", "call_id": id, "output": "3"}
    return client.responses.create(input=[QUESTION, said, result], **{**given, "max_output_tokens": 3}).status


def completions(client: openai.OpenAI, echo: bool) -> bool:
    """Every offset is an index into the text that is returned, and a token's log-probability is its own."""
    asked: Any = {"model": "demo-chat", "prompt": "Hello, é🙂 there", "max_tokens": 8, "temperature": 0}
    found: Any = client.completions.create(logprobs=3, echo=echo, **asked).choices[0]
    offsets, tokens, own, best = (
        getattr(found.logprobs, name) for name in ("text_offset", "tokens", "token_logprobs", "top_logprobs")
    )
    assert offsets == sorted(offsets) and found.text.startswith("Hello") == echo
    for offset, token, logprob, others in zip(offsets, tokens, own, best, strict=True):
        shown = not token.startswith(("bytes:", "<|"))
        assert offset <= len(found.text) and (not shown or found.text.startswith(token, offset)), (offset, token)
        assert others is None or (len(others) >= 3 and others[token] == logprob), (token, others)
    return True


def scenarios(url: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each scenario by name; what it returns is true."""
    vendor = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=limit(60))
    other = anthropic.Anthropic(base_url=url, api_key="k", max_retries=0, timeout=limit(60))
    ways: list[tuple[Callable[..., Any], Any]] = [(chat, vendor), (messages, other), (responses, vendor)]
    for number, (shape, declared) in enumerate(SHAPES.items()):
        tool = {"name": "count", "description": "Count.", **declared}
        for place, (run, client) in enumerate(ways):
            for model in TEMPLATES if shape == "plain" else [[*TEMPLATES][(number + place) % len(TEMPLATES)]]:
                for streams in (False, True) if shape == "plain" else (False,):
                    words = f"{model}, {run.__name__}, {shape}{', streamed' if streams else ''}"
                    yield words, partial(run, client, model, tool, streams)
    for echo in (False, True):
        yield f"completions, echo={echo}", partial(completions, vendor, echo)


def models(place: str) -> dict[str, Path]:
    """Make the folders of the models, of demo-chat's weights."""
    found = {"demo-chat": CHAT}
    for name, (template, names) in [*TEMPLATES.items()][1:]:
        found[name] = Path(shutil.copytree(CHAT, Path(place, name)))
        (found[name] / "chat_template.jinja").write_text(template)
        for file in (found[name] / "tokenizer.json", found[name] / "tokenizer_config.json"):
            text = file.read_text()
            for old, new in zip(CONTROLS, names, strict=True):
                text = text.replace(json.dumps(old), json.dumps(new))
            file.write_text(text)
    return found


def main(words: Sequence[str] = ()) -> int:
    """Run the scenarios whose names have any of these words, all of them without; print a line for each, and return the
    number of faults."""
    faults = 0
    with tempfile.TemporaryDirectory() as place, serving(models(place)) as (url, _):
        for name, run in scenarios(url):
            if words and not any(word in name for word in words):
                continue
            try:
                said = "ok" if run() else "no answer"
            except (AssertionError, anthropic.AnthropicError, openai.OpenAIError, RuntimeError, StopIteration) as error:
                said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            faults += said != "ok"
            print(f"{name:50} {said}", flush=True)
    print(f"{faults} faults")
    return faults


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
