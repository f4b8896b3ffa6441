"""Models of the hub: the files that are read and no others, gone on with, held to their hashes; one error each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import workbench
from tests.helpers.command_line import answer, cli, refused
from tests.helpers.refusals import refuses
from tests.models.endpoint import COMMIT, Hub, serving
from workbench.engine.loaded_model import DEMO_FOLDER
from workbench.models.hub import WHOLE, fetch_from_hub, files_to_read
from workbench.progress import discard

pytest.importorskip("huggingface_hub", reason="models of the hub: pip install huggingface_hub")
DRAFT = {path.name: path.read_bytes() for path in (DEMO_FOLDER / "draft").iterdir()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    beside = dict.fromkeys(("README.md", "pytorch_model.bin", "onnx/model.onnx", "code.py", "a/config.json"), b"#")
    with serving(Hub({**DRAFT, **beside}, large=WHOLE)) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def held(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_files_that_are_read_are_fetched_once_and_loaded_by_name(hub: Hub, models: Path) -> None:
    ran = cli("model get o/n@v1")
    assert f"o/n at {COMMIT[:12]}: 3 files, 2.1 MiB; licence: mit" in ran.err and "o/n@v1 is at hand: " in ran.out
    assert ran.out.endswith("try: workbench model check o/n@v1\n")
    assert sorted(hub.asked) == [(name, None) for name in sorted(DRAFT)]
    assert held(models) == [".lock", *(f"o/n@v1/{name}" for name in sorted([".revision", *DRAFT]))]
    assert (models / "o" / "n@v1" / ".revision").read_text() == COMMIT + "\n"
    hub.refuses = (500, "")
    answer("model get o/n@v1")  # it is not fetched again
    runner = workbench.load("o/n@v1", backend="eager")
    assert [*runner.stream("def f", max_tokens=2)] and runner.config.model.name == "o/n@v1"
    assert answer("model list")["models"][-1]["name"] == "o/n@v1"
    answer("model remove o/n@v1")
    assert held(models) == [".lock"] and not (models / "o").exists()


def test_a_connection_that_breaks_off_goes_on_at_the_byte(
    hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)
    hub.breaks[WHOLE] = 1000
    answer("model get o/n")
    assert [span for name, span in hub.asked if name == WHOLE] == [None, "bytes=1000-"]
    assert (models / "o" / "n" / WHOLE).read_bytes() == DRAFT[WHOLE]


@pytest.mark.parametrize("name", [WHOLE, "config.json"])
def test_a_file_that_is_not_the_hubs_is_deleted_and_the_others_are_kept(name: str, hub: Hub, models: Path) -> None:
    hub.sent[name] = DRAFT[name][::-1]
    assert f"o/n: {name} differs from the file that the hub lists; it was deleted" in refused("model get o/n")
    refuses("no model 'o/n'", workbench.load, "o/n")
    hub.sent.clear()
    hub.asked.clear()
    answer("model get o/n")
    assert hub.asked == [(name, None)] and (models / "o" / "n" / name).read_bytes() == DRAFT[name]


@pytest.mark.parametrize(
    "status, code, words",
    [
        (401, "GatedRepo", "accept the licence on its page, then `hf auth login`"),
        (404, "RepoNotFound", "the hub has no such model, or hides it from you"),
        (404, "RevisionNotFound", "the hub has the model, but not this revision"),
        (400, "", "Bad request"),
    ],
)
def test_what_the_hub_refuses(status: int, code: str, words: str, hub: Hub, models: Path) -> None:
    hub.refuses = (status, code)
    refuses(f"o/n: .*{words}", fetch_from_hub, "o/n", discard)
    assert [*models.iterdir()] == [models / ".lock"]


def test_no_network_and_no_extra(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refuses("o/n: the hub does not answer; run it again with a network", fetch_from_hub, "o/n", discard)
    assert [*models.iterdir()] == [models / ".lock"]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refuses(r"pip install 'inference-workbench\[hub\]'", fetch_from_hub, "o/n", discard)


GGUFS = ["a-Q4_K_M.gguf", "a-Q8_0.gguf", "a-f16-00001-of-00002.gguf", "a-f16-00002-of-00002.gguf"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
TEMPLATE = "additional_chat_templates/rag.jinja"


@pytest.mark.parametrize(
    "names, part, chosen",
    [
        (["config.json", WHOLE, *SHARDS, "consolidated.safetensors", *GGUFS], None, ["config.json", WHOLE]),
        (["config.json", *SHARDS, "x.safetensors", "y/model.safetensors"], None, ["config.json", *SHARDS]),
        ([TEMPLATE, "config.json", "tokenizer.model", "a/tekken.json", WHOLE], None,
         [TEMPLATE, "config.json", "tokenizer.model", WHOLE]),
        (["README.md", GGUFS[0]], None, GGUFS[:1]),
        (["config.json", WHOLE, *GGUFS], "q8_0", GGUFS[1:2]),
        (GGUFS, "f16", GGUFS[2:]),
        (GGUFS, None, "holds the GGUF files a-Q4_K_M.gguf, .*; add a part of one's name: OWNER/NAME:Q4_K_M"),
        (GGUFS, "q5", "holds the GGUF files"),
        (["config.json", "pytorch_model.bin"], None, "holds no GGUF file, and model.safetensors with"),
        (["config.json", WHOLE], "q4", "is read only without :PART"),
    ],
)  # fmt: skip
def test_which_files_are_read(names: list[str], part: str | None, chosen: list[str] | str) -> None:
    if isinstance(chosen, str):
        refuses(chosen, files_to_read, names, part)
    else:
        assert files_to_read(names, part) == chosen
