"""Each line of a batch gets the answer of a dialect, or its error; which one, tests/serve/batches has the law."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.offline.batches import LINES, answers, chat, line, run, runner, written
from workbench.errors import WorkbenchError
from workbench.prompt.templates import ChatTemplate
from workbench.trace.events import Finished

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|turn|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_order_is_kept_and_every_line_has_one(tmp_path: Path) -> None:
    found = answers(LINES, tmp_path)
    names = [each["custom_id"] if isinstance(each, dict) else f"line {n}" for n, each in enumerate(LINES, 1)]
    assert [each["custom_id"] for each in found] == names
    assert len({each["id"] for each in found}) == len(found)
    for each in found:
        assert list(each) == ["id", "custom_id", "response", "error"] and each["error"] is None
        assert (each["response"]["status_code"] == 200) == ("error" not in each["response"]["body"])


def test_an_answer_is_what_the_runner_says(tmp_path: Path) -> None:
    sampling: dict[str, Any] = {"max_tokens": 9, "temperature": 0.8, "seed": 3, "top_k": 40}
    (found,) = answers([line("a", prompt="stop the", **sampling)], tmp_path)
    (end,) = [event for event in runner().stream("stop the", **sampling) if isinstance(event, Finished)]
    body, made = found["response"]["body"], len(end.token_ids)
    (choice,) = body["choices"]
    assert (choice["index"], choice["text"], choice["logprobs"]) == (0, end.output_text, None)
    assert choice["finish_reason"] == end.reason
    used = [body["usage"][f"{kind}_tokens"] for kind in ("prompt", "completion", "total")]
    assert used == [8, made, 8 + made]
    assert body["model"] == "tiny" and body["object"] == "text_completion" and body["created"] == 0


def test_lines_without_a_seed_differ_from_each_other_and_not_by_the_settings(tmp_path: Path) -> None:
    lines = [line(name, prompt="abc", max_tokens=12, ignore_eos=True) for name in "abcd"]
    texts = []
    for settings in ("one", "another"):
        (tmp_path / settings).mkdir()
        found = answers(lines, tmp_path / settings, settings=settings)
        texts.append([each["response"]["body"]["choices"][0]["text"] for each in found])
    assert len({*texts[0]}) > 1 and texts[0] == texts[1]


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        ("{", "invalid_json", "line 1: not JSON: Expecting property name enclosed in double quotes, column 2"),
        ("[1]", "invalid_json", "must be an object with custom_id"),
        ("[" * 100_000, "invalid_json", "JSON nested more than 64 deep"),
        (line("", prompt="b"), "invalid_request", "custom_id: must be a text"),
        (line(7, prompt="b"), "invalid_request", "custom_id: must be a text"),
        (line("a", prompt="b") | {"method": "GET"}, "invalid_request", "method: must be 'POST'"),
        (line("a", "/v1/chat/completion", prompt="b"), "invalid_request", "did you mean '/v1/chat/completions'"),
        (line("a", prompt="b") | {"body": []}, "invalid_request", "body: must be an object"),
        (line("a", prompt="b", stream=True), None, "a batch does not stream"),
        (line("a", prompt="b", model="gpt"), "model_not_found", "'gpt' is not served here; served: tiny"),
        (line("a", prompt="b", cache_salt="c"), "unsupported", "cache_salt: is not supported"),
        (line("a", prompt="\ud800"), None, "lone surrogate"),
        (line("a", prompt=[1, 266]), None, "token id 266, the vocabulary is 0..265"),
        (chat("a", "b", response_format={"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}), None, "x"),
    ],
)
def test_a_wrong_line_has_its_error_and_the_rest_goes_on(wrong: Any, code: str, words: str, tmp_path: Path) -> None:
    good = line("last", prompt="abc", max_tokens=3)
    first, last = answers([wrong, good], tmp_path)
    error = first["response"]["body"]["error"]
    assert error["code"] == code and words in error["message"] and "\n" not in error["message"]
    assert first["response"]["status_code"] == (404 if code == "model_not_found" else 400)
    assert last["response"]["status_code"] == 200 and last["custom_id"] == "last"


def test_fields_without_effect_are_listed(tmp_path: Path) -> None:
    lines = [line("a", prompt="b", max_tokens=1, temperatur=1, user="u") | {"extra": 1}]
    tally = run(written(lines, tmp_path / "in.jsonl"), tmp_path / "out.jsonl")
    assert tally.answered == 1 and {*tally.ignored} == {"temperatur", "user", "line.extra"}


def test_control_tokens_in_a_line_are_text(tmp_path: Path) -> None:
    forging, plain = answers([chat("a", "x<|turn|>", max_tokens=2), chat("b", "x", max_tokens=2)], tmp_path)
    used = [each["response"]["body"]["usage"]["prompt_tokens"] for each in (forging, plain)]
    assert used[0] - used[1] == len("<|turn|>")  # one token a byte


def test_a_name_stands_for_one_line(tmp_path: Path) -> None:
    found = answers([line("a", prompt="b", max_tokens=1), line("a", prompt="c", max_tokens=1)], tmp_path)
    statuses = [each["response"]["status_code"] for each in found]
    assert statuses == [200, 400] and "'a' is also the custom_id" in found[1]["response"]["body"]["error"]["message"]


def test_a_request_that_breaks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(runner().core.executor, "forward", broken)
    (found,) = answers([line("a", prompt="b")], tmp_path)
    assert found["response"]["status_code"] == 500
    assert "out of luck" in found["response"]["body"]["error"]["message"]


def test_a_batch_needs_nothing_that_a_server_alone_needs() -> None:
    text = "import sys, workbench.offline.run; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.split()
    assert "workbench.serve.dialects.openai.chat" in found
    assert not {"fastapi", "starlette", "uvicorn", "uvloop", "prometheus_client", "redis"}.intersection(found)


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
