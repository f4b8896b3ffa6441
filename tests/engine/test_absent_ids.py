"""Special ids that no row of the vocabulary has are taken as absent, with one line at load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny import layer, model_of, runner_of
from tests.prompt.samples import byte_level
from tests.prompt.vocabularies import gguf_byte_level
from workbench.engine.load import load
from workbench.engine.loaded_model import BUNDLED_MODELS, model_folder
from workbench.model.formats.gguf.values import END_NAMES
from workbench.model.spec import ModelSpec
from workbench.prompt.templates import ChatTemplate
from workbench.serve.errors import ApiError
from workbench.serve.server import serve
from workbench.testing.family_checkpoints import random_checkpoint

LEFT_OUT = "the vocabulary has no such row; the token is taken as absent"
NAMES = ["plain", 'my "model", a:b;c\'s (d)']  # of folders
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                          "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    ("file", "ids", "ends"),
    [
        ("config.json", 4096, ()),
        ("config.json", [5, 99999], (5,)),
        ("config.json", -1, ()),
        ("generation_config.json", [2**32 - 1, 6], (6,)),
        ("generation_config.json", 2**40, (7,)),  # that of config.json holds
    ],
)
def test_an_end_beyond_the_vocabulary_does_not_stand_in_a_structured_answers_way(
    tmp_path: Path, file: str, ids: Any, ends: tuple[int, ...]
) -> None:
    shutil.copytree(BUNDLED_MODELS["demo-chat"], tmp_path / "m")
    for name, values in {"config.json": {"eos_token_id": 7}, file: {"eos_token_id": ids}}.items():
        path = tmp_path / "m" / name
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))
    lines: list[str] = []
    runner = load(str(tmp_path / "m"), backend="eager", report=lines.append)
    assert runner.model.spec.eos_token_ids == ends and sum(LEFT_OUT in line and file in line for line in lines) == 1
    wanted = {"kind": "json_schema", "json_schema": SCHEMA}
    events = runner.stream("a", max_tokens=40, temperature=0, response_format=wanted)
    assert set(json.loads("".join(event.text for event in events))) == {"a"}


@pytest.mark.parametrize("id", [2**32 - 1, len(gguf_byte_level("gpt-2")["tokens"])])
def test_a_gguf_files_ids_for_none(tmp_path: Path, id: int) -> None:
    pytest.importorskip("gguf", reason="the writer of the files: pip install gguf")
    from tests.model.families import WIDE
    from tests.model.formats import gguf_of_transformers as writing

    keys = ("bos", "eos", "unknown", "padding")
    values = {**gguf_byte_level("gpt-2"), **{f"{key}_token_id": id for key in keys}}
    changed = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in values.items()}
    model = random_checkpoint("llama", {**WIDE, "vocab_size": len(values["tokens"])})
    path = writing.write_gguf(model, tmp_path / "a.gguf", tmp_path / "hf", "F32", changed=changed)
    lines: list[str] = []
    runner = load(str(path), backend="eager", report=lines.append)
    (line,) = [each for each in lines if LEFT_OUT in each]
    assert all(f"{key}_token_id {id}" in line for key in keys)
    named = tuple(place for place, name in enumerate(values["tokens"]) if name in END_NAMES)
    assert named and runner.model.spec.eos_token_ids == named  # those that are found by name, and no other
    assert runner.chat_template is not None
    assert runner.chat_template.render([{"role": "user", "content": "hi"}]) == "[user] hi"


def test_a_template_that_cannot_be_read_leaves_completions_and_its_place_is_no_clients(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_MODELS["demo-chat"], tmp_path / NAMES[1])
    (tmp_path / NAMES[1] / "chat_template.jinja").write_text("{% if")
    with serve(load(str(tmp_path / NAMES[1]), backend="eager")) as server:
        import openai

        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        name = client.models.list().data[0].id
        assert client.completions.create(model=name, prompt="a", max_tokens=1).choices
        with pytest.raises(openai.BadRequestError, match="has no chat template") as caught:
            client.chat.completions.create(model=name, messages=[{"role": "user", "content": "a"}])
        assert str(tmp_path) not in caught.value.response.text
        client.close()


@pytest.mark.parametrize("stream", [False, True])
def test_an_end_that_the_tokenizer_lacks_has_no_text_and_fails_no_answer(stream: bool) -> None:
    """A row of padding: it is sampled as the end, and stands among the likeliest."""
    import openai

    tokenizer = byte_level()
    end = tokenizer.vocab_size + 2
    spec = ModelSpec(
        name="tiny", vocab_size=end + 6, hidden_size=8, layers=(layer(),), max_position_embeddings=64,
        tie_word_embeddings=True, eos_token_ids=(end,),
    )  # fmt: skip
    runner = runner_of(model_of(spec), tokenizer=tokenizer, prefix="radix", pages=40)
    runner.loaded_model.__dict__["chat_template"] = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% endfor %}", {}
    )
    given: Any = {"model": "tiny", "max_tokens": 4, "logit_bias": {str(end): 100}, "stream": stream}
    with serve(runner) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        said: Any = client.chat.completions.create(
            messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=3, **given
        )
        done: Any = client.completions.create(prompt="a", echo=True, logprobs=3, **given)
        (chat, whole) = ([*said], [*done]) if stream else ([said], [done])
        client.close()
    assert chat[-1].choices[0].finish_reason == whole[-1].choices[0].finish_reason == "stop"
    assert "".join(each.choices[0].text for each in whole) == "a"
    tokens = [token for each in whole for token in each.choices[0].logprobs.tokens]
    assert tokens == ["a", f"token_id:{end}"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("file", ["", "/config.json", "/m.gguf"])
def test_no_path_of_the_server_is_in_an_error_and_every_text_of_a_client_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str
) -> None:
    folder, here = tmp_path / "models" / name, tmp_path / "here"
    folder.mkdir(parents=True)
    here.mkdir()
    for each in ("m.gguf", "m-00002-of-00002.gguf"):
        (folder / each).touch()
    monkeypatch.chdir(here)
    relative = Path("..") / "models" / name / "m.gguf"
    for path in (folder, relative):
        model_folder(str(path))
    place = f"{folder}{file}"
    for form in ("{}: is broken", "model: {}, key: is 7", "cannot be read ('{}')", "file://{}", "m:{}", "in {}."):
        error = ApiError("invalid_request_error", form.format(place))
        assert error.message == str(error) == form.format(Path(place).name)
    second = ApiError("invalid_request_error", f"{relative} and {folder}/m-00002-of-00002.gguf")
    assert second.message == "m.gguf and m-00002-of-00002.gguf"
    clients = ["/etc/passwd", "unknown: '/tmp/x, y'", "/usr/bin/a", f"{folder}-other/x", f"/a{folder}"]
    for kept in ("use /v1/completions, at http://a/home/b or and/or", *clients):
        assert ApiError("invalid_request_error", kept).message == kept
