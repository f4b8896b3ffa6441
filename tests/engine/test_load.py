"""From a name to a runner: what loads, on which backend, and what is refused with the remedy."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch

import workbench
from compiled_kernels import Backend, backend_problems
from tests.engine.tiny import VOCAB, Oracle, request, spec_of
from tests.thorough import THOROUGH
from workbench.engine import loaded_model as load_module
from workbench.engine.load import load
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.engine.runner import generate
from workbench.errors import WorkbenchError
from workbench.executors import select as lanes_module
from workbench.executors.capabilities import Requirements
from workbench.executors.select import Backends, select_backends
from workbench.model.hf.save import save_folder
from workbench.model.hf.weights import random_weights
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Finished

BYTES = BUNDLED_MODELS["demo"].parent / "bytes" / "tokenizer.json"
SPEC = spec_of(eos_token_ids=(0,))


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
    runner = load(name, dtype=dtype, backend="eager")
    assert runner.model.dtype == (dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype))
    assert runner.tokenizer is not None
    ids = runner.tokenizer.encode("def f(")
    rows = runner.model.logits(ids)
    assert rows.shape == (len(ids), runner.model.spec.vocab_size)
    greedy = SamplingParameters(temperature=0, max_tokens=3, ignore_eos=True)
    chosen = finished(runner, Request("a", tuple(ids), greedy))["a"].token_ids
    assert len(chosen) == 3
    if runner.model.dtype == torch.float32:  # bfloat16 has ties, which two ways of computing may break differently
        assert chosen[0] == int(rows[-1].argmax())


def test_auto_dtype_is_what_the_files_say(folder: Path) -> None:
    assert load("demo", backend="eager").model.dtype == torch.bfloat16
    assert load(folder, backend="eager").model.dtype == torch.float32
    for key in ("dtype", "torch_dtype"):
        change_config(folder, dtype="absent", torch_dtype="absent")
        change_config(folder, **{key: "float16"})
        assert load(folder, backend="eager").model.dtype == torch.float16
    change_config(folder, dtype="bfloat16", torch_dtype="float32")
    assert load(folder, backend="eager").model.dtype == torch.bfloat16, "the newer name outranks the older"
    change_config(folder, dtype=None, torch_dtype="absent")
    assert load(folder, backend="eager").model.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "", ["float32"], 16, True, {"a": 1}])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_that_config_json_cannot_mean(folder: Path, key: str, dtype: object) -> None:
    change_config(folder, dtype="absent", torch_dtype="absent")
    change_config(folder, **{key: dtype})
    with pytest.raises(WorkbenchError, match=f"config.json: {key} is .*; it must be one of float32, bfloat16"):
        load(folder, backend="eager")
    assert load(folder, backend="eager", dtype="float32").model.dtype == torch.float32, "asked for, it is not needed"


def test_a_folder_without_a_tokenizer_takes_ids_and_no_text(folder: Path) -> None:
    runner = load(str(folder), backend="eager")
    assert runner.tokenizer is None
    with pytest.raises(WorkbenchError, match="no tokenizer: give token ids in a Request"):
        runner.stream("hello")
    greedy = SamplingParameters(temperature=0, max_tokens=2, ignore_eos=True)
    ended = finished(runner, ["hello", Request("ids", (1, 2, 3), greedy)])
    (text,) = (event for name, event in ended.items() if name != "ids")
    assert text.reason == "refused" and "no tokenizer" in text.error
    assert ended["ids"].reason == "length" and len(ended["ids"].token_ids) == 2


def test_a_text_that_cannot_be_encoded_is_refused_alone() -> None:
    runner = load("demo", backend="eager")
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
        load(folder, backend="eager")


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
    ("harm", "message"),
    [
        (truncated, "cut short .*fetch the file again"),
        (garbage_header, "corrupt .*header is not JSON"),
        (empty, "cut short in its header"),
        (pickled, "pytorch_model.bin: is refused: it is cut short, or pickled"),
        (no_weights, "holds no weights"),
        (missing_shard, "1 of .* shards are missing: model-00001"),
        (no_config, "no config.json in it"),
        (config_is_no_json, "config.json: is not valid JSON"),
        (tokenizer_is_no_json, "tokenizer.json: no readable tokenizer"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(folder: Path, harm, message: str) -> None:
    load(folder, backend="eager")
    harm(folder)
    with pytest.raises(WorkbenchError, match=message) as caught:
        load(folder, backend="eager")
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_shapes_have_seeded_random_weights() -> None:
    runner = load("shape:tiny", backend="eager")
    assert runner.tokenizer is None and runner.model.dtype == torch.bfloat16
    rows = runner.model.logits([1, 2])
    assert torch.equal(rows, load("shape:tiny", backend="eager").model.logits([1, 2]))
    assert not torch.equal(rows, load("shape:tiny", backend="eager", seed=1).model.logits([1, 2]))
    assert load("shape:tiny", backend="eager", dtype="float32").model.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shape:smolm2-135m", "no shape 'smolm2-135m'; did you mean 'smollm2-135m'"),
        ("shape:", "known: tiny, smollm2-135m"),
        ("demmo", "no model 'demmo': .*; did you mean 'demo'"),
        ("demo-darft", "did you mean 'demo-draft'"),
        ("nowhere/at/all", "not a folder here, nor one of demo, demo-draft, demo-chat, shape:NAME"),
    ],
)
def test_a_name_that_is_nothing(name: str, message: str) -> None:
    with pytest.raises(WorkbenchError, match=message):
        load(name, backend="eager")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "flaot32"}, "model.dtype: Input should be 'auto', .* [(]given 'flaot32'[)]; did you mean 'float32'"),
        ({"dtype": torch.int8}, "model.dtype: Input should be 'auto', .* [(]given 'int8'[)]"),
        (
            {"backend": "egaer"},
            "unknown backend 'egaer'; did you mean 'eager'[?]; known here: auto, eager, inductor, triton, mlir",
        ),
        ({"device": "cdua"}, "device 'cdua' does not work here"),
        ({"device": "cuda:77"}, "device 'cuda:77' does not work here .*; cpu always does"),
        ({"overflow": "wrap"}, "schedule.overflow: Input should be 'refuse' or 'cut_oldest'"),
        (
            {"weights": "int8", "activations": "int4"},
            "model.activations: Input should be 'float' or 'int8'",
        ),
        ({"activations": "int8"}, "activations: int8 want weights in int8, not dense; set weights: int8 too"),
        ({"weights": "int4", "activations": "int8"}, "activations: int8 want weights in int8, not int4"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens"),
        ({"page_size": 0}, "cache.page_size: Input should be greater than or equal to 1 [(]given 0[)]"),
        ({"page_size": -64}, "cache.page_size: Input should be greater"),
        ({"pages": 0}, "cache.pages: Input should be greater"),
        ({"pages": -3}, "cache.pages: Input should be greater"),
        ({"page_sise": 16}, "no setting 'page_sise'; did you mean 'page_size'"),
        ({"page_size": 16, "cache": {"page_size": 16}}, "page_size: given twice, by itself and within cache"),
        ({"cache": 3}, "cache: must be a group of settings"),
        ({"cache": {"fromat": "int8"}}, "cache.fromat: unknown key; did you mean 'format'"),
    ],
)
def test_a_setting_that_cannot_be(wrong: dict, message: str) -> None:
    with pytest.raises(WorkbenchError, match=message):
        load("shape:tiny", **{"backend": "eager", **wrong})


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = {
        Backend.EAGER: None,
        **dict.fromkeys((Backend.INDUCTOR, Backend.TRITON, Backend.MLIR), "no C++ compiler found"),
    }
    monkeypatch.setattr(lanes_module, "backend_problems", lambda: problems)


@pytest.mark.usefixtures("without_compiler")
def test_an_explicit_backend_never_falls_back() -> None:
    with pytest.raises(WorkbenchError, match="backend 'inductor' does not work here: no C[+][+] compiler found"):
        load("shape:tiny", backend="inductor")


@pytest.mark.usefixtures("without_compiler")
def test_auto_falls_back_and_says_why() -> None:
    assert load("shape:tiny", backend="auto").model.backend == Backend.EAGER
    backends = select_backends("auto", Requirements())
    assert backends.decode == backends.blocks == Backend.EAGER
    assert "inductor does not work here: no C++ compiler found" in backends.reason


def only(monkeypatch: pytest.MonkeyPatch, *working: Backend) -> None:
    problems = {backend: None if backend in working else "not here" for backend in Backend}
    monkeypatch.setattr(lanes_module, "backend_problems", lambda: problems)


def test_auto_takes_the_fastest_backend_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, Backend.EAGER, Backend.INDUCTOR)
    assert load("shape:tiny", backend="auto").model.backend == Backend.INDUCTOR
    assert select_backends("eager", Requirements()) == Backends.uniform(Backend.EAGER, "asked for")
    only(monkeypatch, *Backend)
    assert select_backends("auto", Requirements()) == Backends(Backend.MLIR, Backend.INDUCTOR, Backend.MLIR, "auto")


def test_mlir_is_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA its kernels would be given the addresses of another memory."""
    only(monkeypatch, *Backend)
    for device in ("cuda", "mps"):
        with pytest.raises(WorkbenchError, match=f"backend 'mlir' does not work here: .*device is '{device}'"):
            select_backends("mlir", Requirements(device=device))
    cuda, mps = Requirements(device="cuda"), Requirements(device="mps")
    assert select_backends("auto", cuda) == Backends.uniform(Backend.TRITON, "auto")
    assert select_backends("auto", mps) == Backends.uniform(Backend.INDUCTOR, "auto")
    only(monkeypatch, Backend.EAGER, Backend.INDUCTOR, Backend.MLIR)
    message = "auto: triton does not work here: not here"
    assert select_backends("auto", cuda) == Backends.uniform(Backend.INDUCTOR, message)
    monkeypatch.setattr(load_module, "_device", lambda name: torch.device(name))
    with pytest.raises(WorkbenchError, match="backend 'mlir' does not work here"):
        load("shape:tiny", backend="mlir", device="cuda")


def test_a_unit_without_effect_is_reported() -> None:
    assert (
        "compile: step has no effect, since eager decodes"
        in load("demo", backend="eager", compile="step").backends.reason
    )
    assert load("demo", backend="eager").backends.reason == "asked for"


@pytest.mark.skipif(
    any(backend_problems()[backend] for backend in (Backend.INDUCTOR, Backend.MLIR)), reason="auto has one backend here"
)
@pytest.mark.parametrize(
    ("weights", "activations"), [("dense", "float"), ("int8", "int8"), *([("int8", "float")] if THOROUGH else [])]
)
def test_auto_decodes_and_prefills_as_the_oracle(weights: str, activations: str) -> None:
    """Nothing stands in for anything: backends are tried, compiled, and chosen."""
    formats = {"weights": weights, "activations": activations}
    runner = load("shape:tiny", backend="auto", max_num_seqs=2, page_size=16, pages=16, **formats)  # type: ignore[arg-type]
    assert "a decode step takes" in runner.backends.reason and "not chosen" not in runner.backends.reason
    Oracle(runner)
    asked = [request("a", 5, 6), request("b", 39, 4)]
    assert {event.reason for event in generate(runner, asked).values()} == {"length"}


def test_pages_left_to_us_hold_every_sequence_in_full(folder: Path) -> None:
    runner = load(folder, backend="eager", max_num_seqs=3, page_size=7)
    assert runner.scheduler.pools[0].num_pages == 3 * -(-SPEC.max_position_embeddings // 7)
    assert load(folder, backend="eager", pages=5).scheduler.pools[0].num_pages == 5


def test_the_front_door_is_this_load() -> None:
    assert workbench.load is load
