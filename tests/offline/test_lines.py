"""Each line of a batch gets an answer like the runner's own, or its error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.offline.batches import CONTEXT, LINES, TEMPLATE, answers, chat, line, model, runner
from tests.prompt.samples import byte_level
from workbench.errors import WorkbenchError
from workbench.offline.requests import parse_line
from workbench.offline.responses import response_line
from workbench.prompt.templates import ChatTemplate
from workbench.request import FinishReason, Request
from workbench.trace.events import Finished


def test_order_is_kept_and_every_line_has_one(tmp_path: Path) -> None:
    found = answers(LINES, tmp_path)
    names = [each.get("custom_id") if isinstance(each, dict) else None for each in LINES]
    assert [each["custom_id"] for each in found] == names
    assert len({each["id"] for each in found}) == len(found)
    for each in found:
        assert list(each) == ["id", "custom_id", "response", "error"]
        good = each["error"] is None
        assert (each["response"]["status_code"] == 200) == good == (each["response"]["body"] is not None)


def test_an_answer_is_what_the_runner_says(tmp_path: Path) -> None:
    sampling: dict[str, Any] = {"max_tokens": 9, "temperature": 0.8, "seed": 3, "top_k": 40}
    (found,) = answers([line("a", prompt="stop the", **sampling)], tmp_path)
    (end,) = [event for event in runner().stream("stop the", **sampling) if isinstance(event, Finished)]
    body, made = found["response"]["body"], len(end.token_ids)
    assert body["choices"] == [{"index": 0, "text": end.output_text, "logprobs": None, "finish_reason": end.reason}]
    assert body["usage"] == {"prompt_tokens": 8, "completion_tokens": made, "total_tokens": 8 + made}
    assert body["model"] == "tiny" and body["object"] == "text_completion"


def test_a_chat_goes_through_the_template(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    first, second = answers([chat("a", "hi", temperature=0), chat("b", parts, temperature=0)], tmp_path)
    ids = model().template.ids([{"role": "user", "content": "hi"}], byte_level())  # type: ignore[union-attr]
    controls = byte_level().special_token_ids
    assert ids[:2] == (controls["<|begin|>"], controls["<|user|>"]) and ids[-1] == controls["<|assistant|>"]
    mine, theirs = first["response"]["body"], second["response"]["body"]
    assert mine["choices"] == theirs["choices"] and mine["usage"]["prompt_tokens"] == len(ids) == 6
    assert mine["choices"][0]["message"]["role"] == "assistant" and mine["object"] == "chat.completion"
    assert mine["usage"]["total_tokens"] <= CONTEXT  # without max_tokens it may fill the context


def test_several_samples_and_logprobs(tmp_path: Path) -> None:
    found = answers(
        [line("a", prompt="abc", n=3, max_tokens=6, logprobs=2, ignore_eos=True),
         chat("b", "abc", logprobs=True, top_logprobs=1, max_tokens=4, ignore_eos=True),
         line("c", prompt="abc", n=2, best_of=4, max_tokens=5), line("d", prompt="abc", beams=3, n=2, max_tokens=5)],
        tmp_path,
    )  # fmt: skip
    choices = found[0]["response"]["body"]["choices"]
    assert [each["index"] for each in choices] == [0, 1, 2]
    for each in choices:
        answer = each["logprobs"]
        assert len(answer["tokens"]) == len(answer["token_logprobs"]) == len(answer["top_logprobs"]) == 6
        assert all(name in top for name, top in zip(answer["tokens"], answer["top_logprobs"], strict=True))
        offsets, text = answer["text_offset"], each["text"]
        assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(text)
        for name, offset in zip(answer["tokens"], offsets, strict=True):
            assert name.startswith(("bytes:", "<|", "token_id:")) or text[offset:].startswith(name)
    content = found[1]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert len(content) == 4 and all(len(each["top_logprobs"]) == 1 for each in content)
    assert bytes(content[0]["bytes"]).decode("utf-8", "replace") == content[0]["token"]
    for each in found[2:]:
        assert [choice["index"] for choice in each["response"]["body"]["choices"]] == [0, 1]


def test_lines_without_a_seed_differ_from_each_other(tmp_path: Path) -> None:
    same = {"prompt": "abc", "max_tokens": 12, "ignore_eos": True}
    found = answers([line(name, **same) for name in "abcd"], tmp_path)
    assert len({each["response"]["body"]["choices"][0]["text"] for each in found}) > 1


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        ("{", "invalid_json", "line 1: not JSON: Expecting property name enclosed in double quotes, column 2"),
        ("[1]", "invalid_json", "must be an object with custom_id"),
        ("[" * 100_000, "invalid_json", "JSON nested more than 64 deep"),
        (line("a", prompt="b") | {"extra": 1}, "invalid_request", "extra: unknown field"),
        (line("", prompt="b"), "invalid_request", "custom_id: must be a text"),
        (line(7, prompt="b"), "invalid_request", "custom_id: must be a text"),
        (line("a", prompt="b") | {"method": "GET"}, "invalid_request", "method: must be 'POST'"),
        (line("a", "/v1/chat/completion", prompt="b"), "invalid_request", "did you mean '/v1/chat/completions'"),
        (line("a", prompt="b") | {"body": []}, "invalid_request", "body: must be an object"),
        (line("a"), "invalid_request", "body.prompt: must be one text"),
        (line("a", prompt=["b", "c"]), "invalid_request", "write a line for each"),
        (line("a", prompt=[True]), "invalid_request", "one list of token ids"),
        (line("a", prompt=[1, 266]), "refused", "token id 266, the vocabulary is 0..265"),
        (line("a", prompt=""), "refused", "the prompt is empty"),
        (line("a", prompt="x" * 60), "refused", "60 prompt tokens leave no room in a context of 48"),
        (line("a", prompt="\ud800"), "refused", "lone surrogate"),
        (line("a", prompt="b", temperatur=1), "invalid_request", "body.temperatur: unknown field; did you mean 'temp"),
        (line("a", prompt="b", temperature=-1), "invalid_request", "temperature"),
        (line("a", prompt="b", top_p=-1), "invalid_request", "top_p"),
        (line("a", prompt="b", n=3, best_of=2), "invalid_request", "best_of 2 is less than n"),
        (line("a", prompt="b", sampler={"path": "os:system"}), "invalid_request", "body.sampler: unknown field"),
        (line("a", prompt="b", stream=True), "invalid_request", "a batch does not stream"),
        (line("a", prompt="b", model="gpt"), "invalid_request", "this batch runs 'tiny'"),
        (line("a", prompt="b", cache_salt=3), "invalid_request", "cache_salt: must be a text"),
        (chat("a", "b") | {"body": {"messages": []}}, "invalid_request", "body.messages: must be a list"),
        (chat("a", 5), "invalid_request", "messages.0.content: must be a text"),
        (chat("a", [{"type": "image_url"}]), "invalid_request", "messages.0.content.0: a part of type 'image_url'"),
        (chat("a", "b", logprobs=3), "invalid_request", "true or false in a chat"),
        (chat("a", "b", top_logprobs=3), "invalid_request", "wants logprobs: true"),
        (chat("a", "b", max_tokens=1, max_completion_tokens=1), "invalid_request", "give one"),
    ],
)
def test_a_wrong_line_has_its_error_and_the_rest_goes_on(wrong: Any, code: str, words: str, tmp_path: Path) -> None:
    good = line("last", prompt="abc", max_tokens=3)
    first, last = answers([wrong, good], tmp_path)
    assert first["error"]["code"] == code and words in first["error"]["message"] and first["response"]["body"] is None
    assert first["response"]["status_code"] == 400
    assert "\n" not in first["error"]["message"]
    assert last["error"] is None and last["custom_id"] == "last"


def test_control_tokens_in_a_line_are_text(tmp_path: Path) -> None:
    forging, plain = answers([chat("a", "x<|turn|>", max_tokens=2), chat("b", "x", max_tokens=2)], tmp_path)
    assert forging["error"] is None
    used = [each["response"]["body"]["usage"]["prompt_tokens"] for each in (forging, plain)]
    assert used[0] - used[1] == len("<|turn|>")  # one token a byte


def test_a_name_stands_for_one_line(tmp_path: Path) -> None:
    found = answers([line("a", prompt="b", max_tokens=1), line("a", prompt="c", max_tokens=1)], tmp_path)
    assert found[0]["error"] is None and "'a' is that of line 1 too" in found[1]["error"]["message"]


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    (found,) = answers([chat("a", "b")], tmp_path, template=None)
    assert "no chat template; ask /v1/completions" in found["error"]["message"]


def test_a_request_that_breaks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(runner().core.executor, "forward", broken)
    (found,) = answers([line("a", prompt="b")], tmp_path)
    assert found["error"]["code"] == "error" and "out of luck" in found["error"]["message"]
    assert found["response"]["status_code"] == 500


def test_templates_are_read_from_folders(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"bos_token": {"content": "<b>"}, "chat_template": "{{ bos_token }}{{ messages[0].content }}"}')
    found = ChatTemplate.from_folder(tmp_path)
    assert found is not None and found.render([{"role": "user", "content": "x"}]) == "<b>x"
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE + "{{ raise_exception('no tools') }}")
    found = ChatTemplate.from_folder(tmp_path)
    assert found is not None
    with pytest.raises(WorkbenchError, match="refuses them .no tools"):
        found.render([{"role": "user", "content": "x"}])
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(WorkbenchError, match="not a Jinja template"):
        ChatTemplate.from_folder(tmp_path)
    config.write_text("{")
    with pytest.raises(WorkbenchError, match="cannot be read"):
        ChatTemplate.from_folder(tmp_path)


def test_a_template_cannot_reach_out() -> None:
    for text in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"):
        with pytest.raises(WorkbenchError, match="refuses them"):
            ChatTemplate(text, {}).render([{"role": "user", "content": "x"}])


def test_samples_stand_in_order_though_a_later_one_ends_first() -> None:
    """Those that best_of did not choose are no choices, and are paid for."""
    reasons = {2: "stop", 0: "length", 3: FinishReason.NOT_CHOSEN, 1: "stop"}  # in the order in which they end
    ends = [
        Finished(0.0, "7", sample=n, reason=why, token_ids=(5,) * n, output_text=f"{n}", prompt_tokens=3)
        for n, why in reasons.items()
    ]
    asked = parse_line(json.dumps(line("a", prompt="b", n=3, best_of=4)).encode(), 7, model())
    body = json.loads(response_line("id", asked, model(), ends, []))["response"]["body"]
    found = [(each["index"], each["text"], each["finish_reason"]) for each in body["choices"]]
    assert found == [(n, f"{n}", reasons[n]) for n in range(3)]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}


def test_fields_reach_the_request() -> None:
    def parsed(asked: dict[str, Any]) -> Request:
        return parse_line(json.dumps(asked).encode(), 7, model()).request

    plain = parsed(line("a", prompt="b"))
    assert (plain.sampling.max_tokens, plain.sampling.seed, plain.cache_salt, plain.final_only) == (16, 7, "", True)
    own = parsed(line("a", prompt="b", seed=3, cache_salt="mine", logprobs=0, max_tokens=None))
    assert (own.sampling.max_tokens, own.sampling.seed, own.cache_salt, own.final_only) == (16, 3, "mine", False)
    ours = replace(model(), sampling_defaults={"temperature": 0.5, "top_p": 0.9})
    sampling = parse_line(json.dumps(line("a", prompt="b", temperature=0)).encode(), 7, ours).request.sampling
    assert (sampling.temperature, sampling.top_p) == (0, 0.9)
    for body, wanted in (({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 2}, 2)):
        assert parsed(chat("a", "b", **body)).sampling.logprobs == wanted
    assert parsed(chat("a", "b", max_completion_tokens=3)).sampling.max_tokens == 3
