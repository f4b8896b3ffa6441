"""A fetched model is found by its name everywhere, one function chooses who speaks, and `remove` deletes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import workbench
from tests.helpers.command_line import answer, cli, refused
from tests.helpers.refusals import refuses
from tests.models.packages import carried
from workbench.engine.loaded_model import DEMO_FOLDER
from workbench.model.hf.convert_gguf import convert_to_gguf
from workbench.models.known import KNOWN, MODELS
from workbench.models.store import default_model, place_of
from workbench.serve.server import served_name_of


@pytest.fixture
def smollm2(models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small demo model, at hand under the name of the real one."""
    models.mkdir(parents=True)
    path = models / KNOWN["smollm2"].file
    convert_to_gguf(DEMO_FOLDER / "draft", path, "dense", torch.float32)
    monkeypatch.setitem(KNOWN, "smollm2", carried(path.read_bytes()))
    return path


def test_a_model_that_is_not_at_hand_names_the_command(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [bool(each.terms) for each in MODELS] == [False, True]
    words = "model 'smollm2' is not fetched, or incomplete: `workbench model get smollm2` fetches it "
    words += ".93.8 MiB, Apache-2.0."
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()  # a known name means the model: ./smollm2 is the folder
    refuses(words, workbench.load, "smollm2")
    refuses("no model 'smolm2': .*; did you mean 'smollm2'", workbench.load, "smolm2")
    refuses("no model 'o/n': .*; `workbench model get o/n` looks on the hub", workbench.load, "o/n")
    assert "did you mean 'smollm2'?; known: smollm2, gemma3-270m; or OWNER/NAME" in refused("model get smolm2")
    models.mkdir(parents=True)
    (models / KNOWN["smollm2"].file).write_bytes(b"GGUF")  # cut short
    refuses(words, workbench.load, "smollm2")
    listed = answer("model list")
    assert listed["default"] == default_model() == "demo-chat"
    assert [each["path"] for each in listed["models"]] == [None, None]
    assert "not fetched: workbench model get gemma3-270m" in cli("model list").text


def test_a_model_at_hand_is_loaded_by_name_and_speaks(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = workbench.load(workbench.default_model(), backend="eager")
    assert [*runner.stream("def f", max_tokens=2)] and served_name_of(runner) == "smollm2"
    ran = cli("chat a --set backend=eager --max-tokens 4")
    assert "[smollm2, round 0: " in ran.out and ran.err.startswith("answering with smollm2\n")
    monkeypatch.setenv("WORKBENCH_DEFAULT_MODEL", "demo-draft")
    ran = cli("chat a --set backend=eager --max-tokens 4 --json")
    assert json.loads(ran.out)["model"] == "demo-draft" and ran.err == ""


def test_memory_and_speed_are_asked_by_name(smollm2: Path) -> None:
    assert answer("model memory smollm2") == answer("model memory", str(smollm2))
    little = "--batch 1 --depth 0 --set workload.prompt_tokens=8 --set workload.output_tokens=2 --no-memory"
    found = cli(f"bench smollm2 --set backend=eager --set measure.rounds=1 {little} --format json").json
    assert [row["status"] for row in found["rows"]] == ["ok", "ok"]


def test_removal(smollm2: Path) -> None:
    listed = cli("model list").text
    assert f" {smollm2.name} " in listed and f"folder of models: {smollm2.parent}" in listed
    assert answer("model remove smollm2") == {"name": "smollm2", "path": str(smollm2)}
    assert not smollm2.exists() and default_model() == "demo-chat"
    for name in ("smollm2", "demo", "../demo"):
        assert f"no model '{name}' was fetched; none can be removed" in refused("model remove", name)


def test_names_of_the_hub_stay_within_the_folder_of_models(models: Path) -> None:
    assert place_of("o/n@refs/pr/1:Q4_K_M") == models / "o" / "n@refs--pr--1:Q4_K_M"
    assert place_of("o/n@a/../../x") == models / "o" / "n@a--..--..--x"
    for name in ("../n", "o/..", "o/n@../../x", "o/n/x", "/etc/x", "o/.n", "plain", "a b/c", "o/n@", "", "o\\n/é"):
        assert place_of(name) is None, name
