"""Exports: the folder holds the very weights, is made once, whole or not at all."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.peers import export
from benchmarks.peers.export import ExportFailure, ModelExports
from benchmarks.peers.process import installed
from benchmarks.peers.scripts import gguf_layout
from tests.benchmarks.fakes import TINY
from workbench.model.hf.families import read_spec
from workbench.model.hf.weights import load_weights, random_weights
from workbench.model.model_parameters import stored_parameters
from workbench.model.spec import NormSpec
from workbench.prompt.tokenization.tokenizer import Tokenizer


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
def test_the_folder_read_again_holds_the_same_model(tmp_path: Path, format: str) -> None:
    folder, remark = ModelExports(tmp_path, TINY, 5, 1).export("folder", format, "no python is needed")
    assert remark == f"weights {format}"
    dtype = getattr(torch, format)
    assert read_spec(folder).model_copy(update={"name": "tiny"}) == TINY
    read, drawn = load_weights(folder, TINY, dtype), random_weights(TINY, dtype, 5)
    assert read.keys() == drawn.keys()
    assert all(torch.equal(read[name], drawn[name]) for name in drawn)
    assert Tokenizer.from_folder(folder) is not None


def test_weights_read_without_torch_are_the_same(tmp_path: Path) -> None:
    folder, _ = ModelExports(tmp_path, TINY, 0, 1).export("folder", "bfloat16", "")
    read = dict(gguf_layout.stored_tensors(folder))
    drawn = random_weights(TINY, torch.bfloat16, 0)
    for ours, parameter in stored_parameters(TINY).items():
        whole = np.concatenate([read.pop(part.name) for part in parameter.parts])
        assert np.array_equal(whole, drawn[ours].float().numpy())
    assert not read
    named = dict(gguf_layout.llama_tensors(folder, json.loads((folder / "config.json").read_text())))
    value = drawn["blocks.1.attention.qkv.weight"].float().numpy()
    query = TINY.layers[0].attention.num_heads * TINY.layers[0].attention.head_dim
    assert np.array_equal(named["blk.1.attn_q.weight"], gguf_layout.permuted(value[:query], 4))
    assert np.array_equal(named["blk.1.attn_v.weight"], value[-32:])


def test_it_is_made_once_for_each_model_format_and_seed(tmp_path: Path) -> None:
    first = ModelExports(tmp_path, TINY, 0, 1).export("folder", "float32", "")
    stamp = (first[0] / "model.safetensors").stat().st_mtime_ns
    assert ModelExports(tmp_path, TINY, 0, 1).export("folder", "float32", "") == first
    assert (first[0] / "model.safetensors").stat().st_mtime_ns == stamp
    other_eps = TINY.model_copy(update={"norm": NormSpec(eps=0.1)})
    others = [
        ModelExports(tmp_path, TINY, 1, 1).export("folder", "float32", "")[0],
        ModelExports(tmp_path, TINY, 0, 1).export("folder", "bfloat16", "")[0],
        ModelExports(tmp_path, other_eps, 0, 1).export("folder", "float32", "")[0],
    ]
    assert len({first[0], *others}) == 4


def test_a_failed_export_leaves_nothing_and_tells_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(python: str, script: str, job: dict, **_: object) -> dict:
        Path(job["target"], "half.bin").write_text("half")
        return {"status": "absent", "reason": "No module named 'gguf'"}

    monkeypatch.setattr(export, "run_script", fails)
    with pytest.raises(ExportFailure, match="gguf") as failure:
        ModelExports(tmp_path, TINY, 0, 1).export("gguf", "int8", "")
    assert failure.value.status == "absent"
    assert not list(tmp_path.rglob("half.bin")) and not list(tmp_path.rglob("gguf*"))


def test_other_versions_of_a_tool_export_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def exports(python: str, script: str, job: dict, **_: object) -> dict:
        made.append(job["target"])
        return {"status": "ok", "detail": ""}

    monkeypatch.setattr(export, "run_script", exports)
    for version in ("1.0", "1.0", "1.1"):
        monkeypatch.setattr(export, "installed", lambda python, packages, version=version: f"{packages} {version}")
        ModelExports(tmp_path, TINY, 0, 1).export("gguf", "int8", "", ["gguf"])
    assert len(made) == 2


def test_installed_versions_are_those_of_the_interpreter() -> None:
    version, found = json.loads(installed(sys.executable, ("torch", "PyYAML", "no-such-distribution")))
    assert version == sys.version and found["torch"] == metadata.version("torch")
    assert found["no-such-distribution"] is None
    assert installed("/no/such/python", ()) == ""
