"""From a name to a runner: what loads, on which lane, and what is refused with the remedy."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch

import workbench
from compiled_kernels import Lane, lane_problems
from tests.engine.tiny import VOCAB, Oracle, request, spec_of
from workbench.engine import lanes as lanes_module
from workbench.engine import load as load_module
from workbench.engine.lanes import Lanes, resolve_lanes
from workbench.engine.load import SHIPPED, load
from workbench.engine.runner import generate
from workbench.errors import WorkbenchError
from workbench.model.save import save_folder
from workbench.model.weights import random_weights
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Finished

BYTES = SHIPPED["demo"].parent / "bytes" / "tokenizer.json"
SPEC = spec_of(end_ids=(0,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model of 31 tokens, without a tokenizer."""
    save_folder(tmp_path / "small", SPEC, random_weights(SPEC, torch.float32), torch.float32)
    return tmp_path / "small"


def change_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in {**config, **fields}.items() if v != "absent"}))


def finished(runner, asked) -> dict[str, Finished]:
    return {e.request_id: e for e in runner.stream(asked) if isinstance(e, Finished)}


@pytest.mark.parametrize("name", ["demo", "demo-draft"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", torch.float32])
def test_the_shipped_models_continue_a_text(name: str, dtype) -> None:
    runner = load(name, dtype=dtype, lane="eager")
    assert runner.model.dtype == (dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype))
    assert runner.tokenizer is not None
    ids = runner.tokenizer.encode("def f(")
    rows = runner.model.logits(ids)
    assert rows.shape == (len(ids), runner.model.spec.vocab)
    greedy = SamplingParameters(temperature=0, max_tokens=3, ignore_eos=True)
    chosen = finished(runner, Request("a", tuple(ids), greedy))["a"].token_ids
    assert len(chosen) == 3
    if runner.model.dtype == torch.float32:  # bfloat16 has ties, which two ways of computing may break differently
        assert chosen[0] == int(rows[-1].argmax())


def test_auto_dtype_is_what_the_files_say(folder: Path) -> None:
    assert load("demo", lane="eager").model.dtype == torch.bfloat16
    assert load(folder, lane="eager").model.dtype == torch.float32
    for key in ("dtype", "torch_dtype"):
        change_config(folder, dtype="absent", torch_dtype="absent")
        change_config(folder, **{key: "float16"})
        assert load(folder, lane="eager").model.dtype == torch.float16
    change_config(folder, dtype="bfloat16", torch_dtype="float32")
    assert load(folder, lane="eager").model.dtype == torch.bfloat16, "the newer name outranks the older"
    change_config(folder, dtype=None, torch_dtype="absent")
    assert load(folder, lane="eager").model.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "", ["float32"], 16, True, {"a": 1}])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_that_config_json_cannot_mean(folder: Path, key: str, dtype: object) -> None:
    change_config(folder, dtype="absent", torch_dtype="absent")
    change_config(folder, **{key: dtype})
    with pytest.raises(WorkbenchError, match=f"config.json: {key} is .*; it must be one of float32, bfloat16"):
        load(folder, lane="eager")
    assert load(folder, lane="eager", dtype="float32").model.dtype == torch.float32, "asked for, it is not needed"


def test_a_folder_without_a_tokenizer_takes_ids_and_no_text(folder: Path) -> None:
    runner = load(str(folder), lane="eager")
    assert runner.tokenizer is None
    with pytest.raises(WorkbenchError, match="no tokenizer: give token ids in a Request"):
        runner.stream("hello")
    greedy = SamplingParameters(temperature=0, max_tokens=2, ignore_eos=True)
    ended = finished(runner, ["hello", Request("ids", (1, 2, 3), greedy)])
    (text,) = (event for name, event in ended.items() if name != "ids")
    assert text.reason == "refused" and "no tokenizer" in text.error
    assert ended["ids"].reason == "length" and len(ended["ids"].token_ids) == 2


def test_a_text_that_cannot_be_encoded_is_refused_alone() -> None:
    runner = load("demo", lane="eager")
    with pytest.raises(WorkbenchError, match="lone surrogate U[+]D800"):
        runner.stream("\ud800")
    events = list(runner.stream(["\ud800", "", "def f("], max_tokens=2, ignore_eos=True))
    ended = [e for e in events if isinstance(e, Finished)]
    by_id = {e.request_id: e for e in ended}
    first, second, third = sorted(by_id)
    assert "lone surrogate" in by_id[first].error and "empty" in by_id[second].error
    assert [by_id[i].reason for i in (first, second, third)] == ["refused", "refused", "length"]


def test_a_tokenizer_larger_than_the_vocabulary(folder: Path) -> None:
    shutil.copy(BYTES, folder / "tokenizer.json")
    with pytest.raises(WorkbenchError, match=f"does not match the vocabulary.* ends at {VOCAB - 1}"):
        load(folder, lane="eager")


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def garbage_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 8) + b"notjson!")


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def missing_shard(folder: Path) -> None:
    save_folder(folder, SPEC, random_weights(SPEC, torch.float32), torch.float32, shard_bytes=2000)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[0].unlink()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def config_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def tokenizer_is_no_json(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (truncated, "cut short .*fetch the file again"),
        (garbage_header, "corrupt .*header is not JSON"),
        (empty, "cut short in its header"),
        (pickled, "pytorch_model.bin is refused: it is pickled"),
        (no_weights, "holds no weights"),
        (missing_shard, "1 of .* shards are missing: model-00001"),
        (no_config, "no config.json in it"),
        (config_is_no_json, "config.json: is not valid JSON"),
        (tokenizer_is_no_json, "tokenizer.json: no readable tokenizer"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(folder: Path, harm, told: str) -> None:
    load(folder, lane="eager")
    harm(folder)
    with pytest.raises(WorkbenchError, match=told) as caught:
        load(folder, lane="eager")
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_shapes_have_seeded_random_weights() -> None:
    runner = load("shape:tiny", lane="eager")
    assert runner.tokenizer is None and runner.model.dtype == torch.bfloat16
    rows = runner.model.logits([1, 2])
    assert torch.equal(rows, load("shape:tiny", lane="eager").model.logits([1, 2]))
    assert not torch.equal(rows, load("shape:tiny", lane="eager", seed=1).model.logits([1, 2]))
    assert load("shape:tiny", lane="eager", dtype="float32").model.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("shape:smolm2-135m", "no shape 'smolm2-135m'; did you mean 'smollm2-135m'"),
        ("shape:", "known: tiny, smollm2-135m"),
        ("demmo", "no model 'demmo': .*; did you mean 'demo'"),
        ("demo-darft", "did you mean 'demo-draft'"),
        ("nowhere/at/all", "not a folder here, nor one of demo, demo-draft, shape:NAME"),
    ],
)
def test_a_name_that_is_nothing(name: str, told: str) -> None:
    with pytest.raises(WorkbenchError, match=told):
        load(name, lane="eager")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"dtype": "flaot32"}, "unknown dtype 'flaot32'; did you mean 'float32'"),
        ({"dtype": torch.int8}, "unknown dtype 'int8'"),
        (
            {"lane": "egaer"},
            "unknown lane 'egaer'; did you mean 'eager'[?]; known here: auto, eager, inductor, triton, mlir",
        ),
        ({"device": "cdua"}, "device 'cdua' does not work here"),
        ({"device": "cuda:77"}, "device 'cuda:77' does not work here .*; cpu always does"),
        ({"overflow": "wrap"}, "unknown overflow 'wrap'; known: refuse, cut_oldest"),
        ({"weights": "int8", "activations": "int4"}, "unknown activations 'int4'; known: float, int8"),
        ({"activations": "int8"}, "activations: int8 want weights in int8, not dense; set weights: int8 too"),
        ({"weights": "int4", "activations": "int8"}, "activations: int8 want weights in int8, not int4"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"page_size": -64}, "page_size must be at least 1"),
        ({"pages": 0}, "pages and page_size must be at least 1"),
        ({"pages": -3}, "pages and page_size must be at least 1"),
    ],
)
def test_a_setting_that_cannot_be(wrong: dict, told: str) -> None:
    with pytest.raises(WorkbenchError, match=told):
        load("shape:tiny", **{"lane": "eager", **wrong})


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = {Lane.EAGER: None, **dict.fromkeys((Lane.INDUCTOR, Lane.TRITON, Lane.MLIR), "no C++ compiler found")}
    monkeypatch.setattr(lanes_module, "lane_problems", lambda: problems)


@pytest.mark.usefixtures("without_compiler")
def test_a_lane_asked_for_never_falls_back() -> None:
    with pytest.raises(WorkbenchError, match="lane 'inductor' does not work here: no C[+][+] compiler found"):
        load("shape:tiny", lane="inductor")


@pytest.mark.usefixtures("without_compiler")
def test_auto_falls_back_and_says_why() -> None:
    assert load("shape:tiny", lane="auto").model.lane == Lane.EAGER
    lanes = resolve_lanes("auto")
    assert lanes.decode == lanes.blocks == Lane.EAGER
    assert "inductor does not work here: no C++ compiler found" in lanes.reason


def only(monkeypatch: pytest.MonkeyPatch, *working: Lane) -> None:
    problems = {lane: None if lane in working else "not here" for lane in Lane}
    monkeypatch.setattr(lanes_module, "lane_problems", lambda: problems)


def test_auto_takes_the_fastest_lane_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, Lane.EAGER, Lane.INDUCTOR)
    assert load("shape:tiny", lane="auto").model.lane == Lane.INDUCTOR
    assert resolve_lanes("eager") == Lanes.one(Lane.EAGER, "asked for")
    only(monkeypatch, *Lane)
    assert (resolve_lanes("auto").decode, resolve_lanes("auto").blocks) == (Lane.MLIR, Lane.INDUCTOR)


def test_mlir_is_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA its kernels would be given the addresses of another memory."""
    only(monkeypatch, *Lane)
    for device in ("cuda", "mps"):
        with pytest.raises(WorkbenchError, match=f"lane 'mlir' does not work here: .*device is '{device}'"):
            resolve_lanes("mlir", device)
    assert resolve_lanes("auto", "cuda") == Lanes.one(Lane.TRITON, "auto")
    assert resolve_lanes("auto", "mps") == Lanes.one(Lane.INDUCTOR, "auto")
    only(monkeypatch, Lane.EAGER, Lane.INDUCTOR, Lane.MLIR)
    assert resolve_lanes("auto", "cuda") == Lanes.one(Lane.INDUCTOR, "auto")
    monkeypatch.setattr(load_module, "_device", lambda name: torch.device(name))
    with pytest.raises(WorkbenchError, match="lane 'mlir' does not work here"):
        load("shape:tiny", lane="mlir", device="cuda")


def test_a_unit_without_effect_is_told() -> None:
    assert "compile: step has no effect, since eager decodes" in load("demo", lane="eager", compile="step").lanes.reason
    assert load("demo", lane="eager").lanes.reason == "asked for"


@pytest.mark.skipif(any(lane_problems()[lane] for lane in (Lane.INDUCTOR, Lane.MLIR)), reason="auto has one lane here")
@pytest.mark.parametrize(("weights", "activations"), [("dense", "float"), ("int8", "float"), ("int8", "int8")])
def test_auto_decodes_and_prefills_as_the_oracle(weights: str, activations: str) -> None:
    """Nothing stands in for anything: lanes are tried, compiled, and chosen."""
    formats = {"weights": weights, "activations": activations}
    runner = load("shape:tiny", lane="auto", max_num_seqs=2, page_size=16, pages=16, **formats)
    assert "a decode step takes" in runner.lanes.reason and "not chosen" not in runner.lanes.reason
    Oracle(runner)
    asked = [request("a", 5, 6), request("b", 39, 4)]
    assert {event.reason for event in generate(runner, asked).values()} == {"length"}


def test_pages_left_to_us_hold_every_sequence_in_full(folder: Path) -> None:
    runner = load(folder, lane="eager", max_num_seqs=3, page_size=7)
    assert runner.scheduler.pools[0].pages == 3 * -(-SPEC.context // 7)
    assert load(folder, lane="eager", pages=5).scheduler.pools[0].pages == 5


def test_the_front_door_is_this_load() -> None:
    assert workbench.load is load
