"""Send a server in a process of its own what strangers may send, in every protocol, and see that it lives on.

`python -m tests.serve.strangers` prints a line for each kind of request. A schema that the compiler cannot survive is
refused with its path, one of a type's bounds is carried out, and a text in parts makes the prompt of the whole text.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.processes import PIPE, Process, start_python
from tests.patience import limit, until
from tests.prompt import model_templates

CHAT = Path(__file__).parents[2] / "workbench/demo/chat"
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
OBJECT = {"type": "object", "required": ["a"], "additionalProperties": False}


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    return {**OBJECT, "properties": {"a": schema}}


REFUSED = {
    "enum of -2^63": _of_object({"enum": [INT64_MIN]}),
    "const of -2^63 + 1": _of_object({"const": -INT64_MAX}),
    "const of -2^63 as a double": _of_object({"const": float(INT64_MIN)}),
    "deep enum": _of_object({"anyOf": [{"items": {"enum": [{"b": [INT64_MIN]}]}}, {"type": "null"}]}),
    "both bounds -2^63": _of_object({"type": "integer", "minimum": INT64_MIN, "maximum": INT64_MIN}),
    "enum beyond 2^53": _of_object({"enum": [1234567890123456789]}),
    "enum beyond 64 bits": _of_object({"enum": [2**70 + 1]}),
}
CARRIED_OUT = {
    "bounds of int64": _of_object({"type": "integer", "minimum": INT64_MIN, "maximum": INT64_MAX}),
    "bounds of uint64": _of_object({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}),
    "exclusive bounds of int64": _of_object({"type": "integer", "exclusiveMinimum": INT64_MIN - 1}),
    "bounds of doubles": _of_object({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1e308}),
    "an ordinary enum": _of_object({"enum": [1, 2.5, "x"]}),
}
SCHEMAS = {**REFUSED, **CARRIED_OUT}
BEYOND_64_BITS = ("enum beyond 64 bits", "exclusive bounds of int64")  # a line of a batch with such a number is refused
IN_BATCHES = {name: schema for name, schema in SCHEMAS.items() if name not in BEYOND_64_BITS}


def _tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": "f", "description": "d", "parameters": schema}


def _chat_tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": _tool(schema)}]}


def _own_format(schema: dict[str, Any]) -> dict[str, Any]:
    grammar = {"grammars": [{"json_schema": schema, "name": "%llguidance"}]}
    return {"structured_outputs": {"grammar": json.dumps(grammar)}}


# By name: the path, and what a body of that path has beside the prompt for a schema.
WAYS: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "chat, response_format": (
        "/v1/chat/completions",
        lambda schema: {
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        },
    ),
    "chat, structured_outputs": ("/v1/chat/completions", lambda schema: {"structured_outputs": {"json": schema}}),
    "chat, a tool": ("/v1/chat/completions", _chat_tool),
    "chat, a required tool": (
        "/v1/chat/completions",
        lambda schema: {**_chat_tool(schema), "tool_choice": "required"},
    ),
    "completions": ("/v1/completions", lambda schema: {"structured_outputs": {"json": schema}}),
    "completions, Lark": (
        "/v1/completions",
        lambda schema: {"structured_outputs": {"grammar": f"start: %json {json.dumps(schema)}"}},
    ),
    "completions, the compiler's own format": ("/v1/completions", _own_format),
    "messages, output_config": (
        "/v1/messages",
        lambda schema: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    ),
    "messages, a tool": (
        "/v1/messages",
        lambda schema: {"tools": [{"name": "f", "description": "d", "input_schema": schema}]},
    ),
    "responses, text.format": (
        "/v1/responses",
        lambda schema: {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}},
    ),
    "responses, a tool": ("/v1/responses", lambda schema: {"tools": [{"type": "function", **_tool(schema)}]}),
}
QUESTION = [{"role": "user", "content": "hi"}]
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 40},
    "/v1/completions": {"prompt": "hi", "max_tokens": 40},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 40},
    "/v1/responses": {"input": "hi", "max_output_tokens": 40},
}


ROLES = ("system", "user", "assistant", "tool")
SYSTEM, USER, ASSISTANT, TOOL = (("Be ", f"brief, {each}", ".") for each in ROLES)


def parts(texts: tuple[str, ...], are_cut: bool, kind: str = "text") -> Any:
    """A content: one text, or its parts."""
    return [{"type": kind, "text": each} for each in texts] if are_cut else "".join(texts)


def chat(are_cut: bool, calls: bool) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "calculate", "arguments": '{"expression": "1"}'}}
    called = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": parts(TOOL, are_cut)},
    ]
    return {
        "model": "demo-chat",
        "max_tokens": 1,
        "messages": [
            {"role": "developer", "content": parts(SYSTEM, are_cut)},
            {"role": "user", "content": parts(USER, are_cut)},
            {"role": "assistant", "content": parts(ASSISTANT, are_cut)},
            {"role": "user", "content": "q"},
            *(called if calls else ()),
        ],
    }


def messages(are_cut: bool, calls: bool) -> dict[str, Any]:
    use = {"type": "tool_use", "id": "c1", "name": "calculate", "input": {"expression": "1"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": parts(TOOL, are_cut)}
    called = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {
        "model": "demo-chat",
        "max_tokens": 1,
        "system": parts(SYSTEM, are_cut),
        "messages": [
            {"role": "user", "content": parts(USER, are_cut)},
            {"role": "assistant", "content": parts(ASSISTANT, are_cut)},
            {"role": "user", "content": "q"},
            *(called if calls else ()),
        ],
    }


def responses(are_cut: bool, calls: bool) -> dict[str, Any]:
    called = [
        {"type": "function_call", "call_id": "c1", "name": "calculate", "arguments": '{"expression": "1"}'},
        {"type": "function_call_output", "call_id": "c1", "output": parts(TOOL, are_cut, "input_text")},
    ]
    return {
        "model": "demo-chat",
        "max_output_tokens": 1,
        "input": [
            {"role": "system", "content": parts(SYSTEM, are_cut, "input_text")},
            {"role": "user", "content": parts(USER, are_cut, "input_text")},
            {"role": "assistant", "content": parts(ASSISTANT, are_cut, "output_text")},
            {"role": "user", "content": "q"},
            *(called if calls else ()),
        ],
    }


PROTOCOLS: dict[str, tuple[Callable[[bool, bool], dict[str, Any]], str, str]] = {
    # bodies; the path that counts their tokens, without an answer; the field of the count
    "/v1/chat/completions": (chat, "/tokenize", "count"),
    "/v1/messages": (messages, "/v1/messages/count_tokens", "input_tokens"),
    "/v1/responses": (responses, "/v1/responses/input_tokens", "input_tokens"),
}
ANSWERED = {"max_tokens", "max_output_tokens"}  # fields of a body that is answered, and not counted


def body_of(way: str, schema: dict[str, Any], model: str = "demo-chat") -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request for a schema."""
    path, fields = WAYS[way]
    return path, {"model": model, **PROMPTS[path], **fields(schema)}


def fault_of(status: int, answer: str, way: str, name: str) -> str:
    """Return what is wrong with an answer; empty if nothing is."""
    if way.endswith("a tool") and status == 200:
        return ""  # called or not as the model likes: what the grammar does not carry out is left to the check
    if way == "completions, the compiler's own format":
        return "" if status == 400 and "is JSON, and no grammar in Lark" in answer else f"{status}: {answer}"
    if name in CARRIED_OUT:
        return "" if status == 200 else f"{status}: {answer}"
    is_named = "is not supported" in answer and any(each in answer for each in (".a", "character"))
    return "" if status == 400 and is_named else f"{status}: {answer}"


@contextmanager
def serving(models: dict[str, Path]) -> Iterator[tuple[str, Process]]:
    """Serve folders under names, in a process of its own; the first is the main one. Yields its address."""
    (first, folder), *others = models.items()
    settings = {
        "model": str(folder), "served_name": first, "backend": "eager", "server": {"port": 0},
        "models": {name: {"model": str(each), "backend": "eager"} for name, each in others},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "server.yaml")
        file.write_text(json.dumps(settings))
        process = start_python("-m", "workbench", "serve", str(file), "--json", stdout=PIPE)
        try:
            printed = ""
            while not printed.endswith("}\n"):
                assert (line := process.stdout.readline()), "the server did not start"
                printed += line
            yield json.loads(printed)["url"], process
        finally:
            process.terminate()
            process.wait()


def send_schemas(client: httpx.Client) -> Iterator[tuple[str, str]]:
    """Send every schema in every way; yield what was sent, and its fault."""
    for way in WAYS:
        for name, schema in SCHEMAS.items():
            path, body = body_of(way, schema)
            answer = client.post(path, json=body)
            yield way, fault_of(answer.status_code, answer.text, way, name)


def send_batches(client: httpx.Client) -> Iterator[tuple[str, str]]:
    """Send the schemas as lines of a batch, and as a batch of messages; yield what was sent, and its fault."""
    way = "chat, response_format"
    lines = [
        {"custom_id": name, "method": "POST", "url": WAYS[way][0], "body": body_of(way, schema)[1]}
        for name, schema in IN_BATCHES.items()
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file = client.post("/v1/files", files={"file": ("a.jsonl", text)}, data={"purpose": "batch"}).json()
    order = {"input_file_id": file["id"], "endpoint": WAYS[way][0], "completion_window": "24h"}
    batch = client.post("/v1/batches", json=order).json()
    batch = _ended(client, f"/v1/batches/{batch['id']}", "status", "completed")
    for key in ("output_file_id", "error_file_id"):
        if batch.get(key):
            for line in map(json.loads, client.get(f"/v1/files/{batch[key]}/content").text.splitlines()):
                response = line["response"] or {"status_code": 400, "body": line["error"]}
                answer = json.dumps(response["body"])
                yield "a batch", fault_of(response["status_code"], answer, way, line["custom_id"])
    way, names = "messages, output_config", list(IN_BATCHES)
    asked = [{"custom_id": f"c{n}", "params": body_of(way, IN_BATCHES[name])[1]} for n, name in enumerate(names)]
    sent = client.post("/v1/messages/batches", json={"requests": asked})
    batch = sent.json()
    batch = _ended(client, f"/v1/messages/batches/{batch['id']}", "processing_status", "ended")
    for line in map(json.loads, client.get(f"/v1/messages/batches/{batch['id']}/results").text.splitlines()):
        result = line["result"]
        status = 200 if result["type"] == "succeeded" else 400
        yield "a batch of messages", fault_of(status, json.dumps(result), way, names[int(line["custom_id"][1:])])


def _ended(client: httpx.Client, path: str, field: str, value: str) -> dict[str, Any]:
    """Return a batch once its field has this value."""
    until(lambda: client.get(path).json()[field] == value)
    return client.get(path).json()


def send_parts(client: httpx.Client, model: str) -> Iterator[tuple[str, str]]:
    """Send a text whole and in parts, in every role and protocol; yield what was sent, and its fault."""
    for path, (make, counting, count) in PROTOCOLS.items():
        numbers = []
        for are_cut in (False, True):
            body = {**make(are_cut, model != "folded"), "model": model}
            counted = {key: value for key, value in body.items() if key not in ANSWERED}
            answers = client.post(path, json=body), client.post(counting, json=counted)
            bad = next((each.text for each in answers if each.status_code != 200), None)
            numbers.append(bad or (answers[1].json()[count], answers[1].json().get("tokens")))
        whole, cut = numbers
        is_whole = whole == cut and not isinstance(whole, str)
        yield f"parts, {path}", "" if is_whole else f"{model}: whole {whole}, in parts {cut}"


def main() -> int:
    """Send everything, print a line for each kind, and return the number of faults."""
    sent, faults = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as place:
        models = {"demo-chat": CHAT}
        for name, template in {**model_templates.ALL, "parts_alone": model_templates.PARTS_ALONE}.items():
            models[name] = Path(shutil.copytree(CHAT, Path(place, name)))
            (models[name] / "chat_template.jinja").write_text(template)
        with serving(models) as (url, process), httpx.Client(base_url=url, timeout=limit(60)) as client:
            in_parts = chain.from_iterable(send_parts(client, name) for name in models)
            for what, fault in chain(send_schemas(client), send_batches(client), in_parts):
                sent[what] += 1
                faults += [f"{what}: {fault}"] if fault else []
            asked = client.post("/v1/completions", json={"model": "demo-chat", "prompt": "hi", "max_tokens": 1})
            faults += [] if asked.status_code == 200 and process.poll() is None else ["the server is not alive"]
    for what, count in sent.items():
        print(f"{what:42} {count:3} sent, {sum(each.startswith(f'{what}: ') for each in faults)} wrong")
    print(*faults, f"{sum(sent.values())} requests, {len(faults)} wrong; the server is alive at the end", sep="\n")
    return len(faults)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
