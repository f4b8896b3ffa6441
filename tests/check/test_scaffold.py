"""`workbench model new-family`: the nearest family is found, unknown keys refuse, and the scaffolded test passes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.command_line import answer, cli, refused
from tests.model.families import NEEDS_TRANSFORMERS, draw_ids
from tests.thorough import some
from workbench.check.scaffold import nearest_family, scaffold
from workbench.engine.load import load
from workbench.errors import WorkbenchError
from workbench.model.hf.families import FAMILIES
from workbench.testing.family_checkpoints import CONFIGS, FAMILY_CASES, random_checkpoint

pytestmark = NEEDS_TRANSFORMERS


def family_name(each: object) -> str:
    return each if isinstance(each, str) else ""


ROOT = Path(__file__).resolve().parents[2]


def copied(family: str, folder: Path, changes: dict[str, Any] | None = None, **keys: Any) -> Path:
    """A folder of a known family under another model_type, with further keys."""
    random_checkpoint(family, CONFIGS[family][0] if changes is None else changes).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "my_own", "architectures": ["MyOwnForCausalLM"], **keys}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder


# Keys that the families' own code ignores too, or derives from others: a user decides on them.
TO_DECIDE = {
    "mpt": {"embedding_fraction", "learned_pos_emb"},
    "gemma3_text": {"_sliding_window_pattern"},
    "deepseek_v2": {"head_dim", "qk_head_dim"},
    "deepseek_v3": {"head_dim", "qk_head_dim", "num_nextn_predict_layers"},
    "mamba2": {
        "chunk_size",
        "num_attention_heads",
        "num_key_value_heads",
        "rescale_prenorm_residual",
        "residual_in_fp32",
        "time_step_floor",
        "time_step_max",
        "time_step_min",
        "time_step_rank",
    },  # fmt: skip
    "bamba": {"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"},
    "falcon_h1": {"mamba_chunk_size", "num_logits_to_keep"},
    "gemma3n_text": {"altup_coef_clip"},
}


@pytest.mark.parametrize(("family", "changes"), some(FAMILY_CASES, 12), ids=family_name)
def test_a_copy_of_a_known_family_is_read_as_that_is(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Every tensor is found and no key unknown; where nothing else is as near, logits are equal bit for bit."""
    folder = copied(family, tmp_path / "model", changes)
    near = nearest_family(folder)
    assert family in (near.family, *near.also) and near.missing == near.extra == ()
    assert set(near.unknown) == TO_DECIDE.get(family, set())
    if near.also or near.unknown:
        return
    table, _ = scaffold("my_own", folder, tmp_path)
    mine = load(folder, custom=str(table), backend="eager", dtype="float32").model
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": family, "architectures": None}))
    known = load(folder, backend="eager", dtype="float32").model
    ids = draw_ids(12, 5)
    assert torch.equal(mine.logits(ids), known.logits(ids)), near.family


def test_families_that_nothing_tells_apart_are_named(tmp_path: Path) -> None:
    """Helium's tensors and keys are Llama's; only its code says that rotary pairs are interleaved."""
    folder = copied("helium", tmp_path / "model")
    near = nearest_family(folder)
    assert {"llama", "helium"} <= {near.family, *near.also}
    assert "neither tensors nor keys tell them apart" in scaffold("mine", folder, tmp_path)[0].read_text()


@pytest.mark.processes
def test_the_scaffolded_test_passes(tmp_path: Path) -> None:
    folder = copied("olmo2", tmp_path / "model")
    written = cli("model new-family my_own", folder, "--out", tmp_path).out.split()
    assert written == [str(tmp_path / "my_own.py"), str(tmp_path / "test_my_own.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_my_own.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed, 1 skipped" in done.stdout, done.stdout
    for checked in (("check", "--config", str(ROOT / "pyproject.toml")), ("format", "--check")):
        ruff = [sys.executable, "-m", "ruff", *checked, "--no-cache", str(tmp_path)]
        lint = subprocess.run(ruff, capture_output=True, text=True, cwd=ROOT)
        assert lint.returncode == 0, lint.stdout
    custom = ("--custom", tmp_path / "my_own.py")
    found = answer("model check", folder, *custom)
    assert found["family"] == "my_own" and found["mechanisms"]["place of norms"] == "after each part"
    assert "transformers cannot load it" in found["comparison"]["skipped"]
    assert "tokenizer" in refused(
        "generate a --model", folder, f"--set=model.custom={custom[1]}"
    )  # the folder has none


def test_unknown_keys_refuse_until_they_are_decided(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path / "model", secret_gate=0.5, secret_list=[1, 2], nothing=None)
    assert nearest_family(folder).unknown == {"secret_gate": 0.5, "secret_list": [1, 2]}
    table, _ = scaffold("my_first", folder, tmp_path)
    with pytest.raises(WorkbenchError, match=r"secret_gate is 0\.5; it must be null: other values are not supported"):
        load(folder, custom=str(table), backend="eager")
    text = table.read_text()
    assert '"secret_gate": (),  # 0.5 there' in text
    table.write_text(
        text.replace('"secret_gate": ()', '"secret_gate": (0.5,)').replace('_list": ()', '_list": ([1, 2],)')
    )
    assert load(folder, custom=str(table), backend="eager").model.spec.hidden_size == 64


def test_sizes_under_other_names_are_renamed(tmp_path: Path) -> None:
    keys = {"hidden_size": ..., "d_model": 64, "num_hidden_layers": ..., "n_layers": 4}
    folder = copied("llama", tmp_path / "model", **keys)
    near = nearest_family(folder)
    assert near.family == "llama" and near.renames == {"hidden_size": "d_model", "num_hidden_layers": "n_layers"}
    table, _ = scaffold("renamed_sizes", folder, tmp_path)
    assert load(folder, custom=str(table), backend="eager").model.spec.hidden_size == 64


def test_a_folder_without_weights_is_judged_by_its_keys(tmp_path: Path) -> None:
    folder = copied("granite", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert nearest_family(folder).family == "granite"


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("my-own", {}, "cannot be called 'my-own'"),
        ("class", {}, "cannot be called 'class'"),
        ("mine", {"model_type": "llama"}, "is known already"),
        ("mine", {"model_type": None}, "no model_type"),
        ("mine", {"hidden_size": ...}, "no known family reads a config like this one; nearest is"),
    ],
)
def test_what_cannot_be_scaffolded_is_refused(tmp_path: Path, name: str, keys: dict[str, Any], words: str) -> None:
    folder = copied("llama", tmp_path / "model", **keys)
    with pytest.raises(WorkbenchError, match=words):
        scaffold(name, folder, tmp_path)
    assert not list(tmp_path.glob("*.py"))


def test_nothing_is_written_over(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path / "model")
    scaffold("mine", folder, tmp_path)
    with pytest.raises(WorkbenchError, match=r"mine\.py: exists already"):
        scaffold("mine", folder, tmp_path)


def test_a_file_that_is_not_there_is_refused_where_it_is_set() -> None:
    with pytest.raises(WorkbenchError, match=r"there is no file nowhere\.py"):
        load("demo", custom="nowhere.py")


def test_the_refusal_of_a_family_names_this_way(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="`workbench model new-family` begins one of your own"):
        load(copied("llama", tmp_path, model_type="unheard_of"))
    assert "unheard_of" not in FAMILIES
