"""PyTorch's own files are read as safetensors are, and nothing but tensors comes out of them."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tests.model.formats.folders import PACKERS, TINY, same, write_quantized
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.model.hf.save import save_folder
from workbench.model.hf.weights import load_weights, random_weights

FILE = "pytorch_model.bin"


def as_torch(folder: Path, **options: Any) -> dict[str, Tensor]:
    """Put the folder's weights into PyTorch's file in place of safetensors."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / FILE, **options)
    return state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_folder(tmp_path / "m", TINY, random_weights(TINY, torch.bfloat16), torch.bfloat16)
    return tmp_path / "m"


def test_torch_files_are_read(folder: Path) -> None:
    expected = load_weights(folder, TINY, torch.float32)
    as_torch(folder)
    assert same(load_weights(folder, TINY, torch.float32), expected)


def test_shards_are_read(folder: Path) -> None:
    expected = load_weights(folder, TINY, torch.float32)
    state = as_torch(folder)
    (folder / FILE).unlink()
    shards = {
        "pytorch_model-00001-of-00002.bin": list(state)[::2],
        "pytorch_model-00002-of-00002.bin": list(state)[1::2],
    }
    for name, keys in shards.items():
        torch.save({key: state[key] for key in keys}, folder / name)
    index = {"weight_map": {key: name for name, keys in shards.items() for key in keys}}
    (folder / f"{FILE}.index.json").write_text(json.dumps(index))
    assert same(load_weights(folder, TINY, torch.float32), expected)
    twice = {key: state[key] for key in state}
    torch.save(twice, folder / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(WorkbenchError, match="holds one too; keep one"):
        load_weights(folder, TINY, torch.float32)


def test_safetensors_outrank_torch_files(folder: Path) -> None:
    (folder / FILE).write_bytes(b"junk")
    assert load_weights(folder, TINY, torch.float32)


def test_quantized_weights_in_torch_files(tmp_path: Path) -> None:
    dense = write_quantized(tmp_path / "m", PACKERS["gptq 4 bits"])
    as_torch(tmp_path / "m")
    assert same(*(load_weights(each, TINY, torch.float32) for each in (tmp_path / "m", dense)))


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("it-ran",)


def _compressed(folder: Path) -> None:
    with zipfile.ZipFile(folder / FILE) as stored:
        entries = {name: stored.read(name) for name in stored.namelist()}
    with zipfile.ZipFile(folder / FILE, "w", zipfile.ZIP_DEFLATED) as bomb:
        for name, content in entries.items():
            bomb.writestr(name, content)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: torch.save({"a": Malicious()}, folder / FILE), "only tensors are read"),
        (lambda folder: torch.save({"a": 1}, folder / FILE), "a is not a tensor"),
        (lambda folder: torch.save([torch.ones(2)], folder / FILE), "no mapping of names to tensors"),
        (lambda folder: torch.save({}, folder / FILE, _use_new_zipfile_serialization=False), "without an archive"),
        (lambda folder: (folder / FILE).write_bytes(b"\x80\x04junk"), "without an archive"),
        (lambda folder: (folder / FILE).write_bytes(b"version https://git-lfs"), "Git LFS"),
        (_compressed, "is compressed"),
        (lambda folder: torch.save({"a": torch.ones(1).expand(1 << 40)}, folder / FILE), "more numbers than are"),
        (lambda folder: torch.save({"a": torch.eye(2).to_sparse()}, folder / FILE), "more numbers than are"),
        (lambda folder: torch.save({"a": torch.ones(2, dtype=torch.bool)}, folder / FILE), "lacks model.embed_tokens"),
    ],
)
def test_what_is_no_mapping_of_tensors_is_refused(
    folder: Path, spoil: Callable[[Path], object], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    as_torch(folder)
    spoil(folder)
    with pytest.raises(WorkbenchError, match=f"^{folder}.*{said}") as caught:
        load_weights(folder, TINY, torch.float32)
    assert "\n" not in str(caught.value) and not (tmp_path / "it-ran").exists()


@settings(max_examples=tries(40))
@given(st.data())
def test_any_damage_is_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    save_folder(folder, TINY, random_weights(TINY, torch.bfloat16), torch.bfloat16)
    as_torch(folder)
    content = bytearray((folder / FILE).read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, 4000))] = data.draw(st.integers(0, 255))
    (folder / FILE).write_bytes(content)
    try:
        state = load_weights(folder, TINY, torch.bfloat16)
    except WorkbenchError as error:
        assert "\n" not in str(error)
    else:
        assert len(state) > 10
