"""From a name to a runner: what loads, on which backend, and what is refused with the remedy."""

from __future__ import annotations

import json
import shutil
import struct
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import workbench
from compiled_kernels import Backend
from tests.engine.tiny import VOCAB, spec_of
from tests.helpers.events import of
from tests.patience import limit
from workbench import progress
from workbench.engine import loaded_model as load_module
from workbench.engine.config import EngineConfig, ModelConfig
from workbench.engine.load import load
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.errors import WorkbenchError
from workbench.executors import select as lanes_module
from workbench.executors.requirements import Requirements
from workbench.executors.select import Backends, select_backends
from workbench.model.attention_config import AttentionConfig
from workbench.model.formats.gguf.checkpoint import GGUFStoredTensor
from workbench.model.hf.convert_gguf import convert_to_gguf
from workbench.model.hf.save import save_folder
from workbench.model.hf.weights import random_weights
from workbench.progress import discard, report_if_slow
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
    return {e.request_id: e for e in of(Finished, runner.stream(asked))}


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
    ended = of(Finished, events)
    by_id = {e.request_id: e for e in ended}
    first, second, third = sorted(by_id)
    assert "lone surrogate" in by_id[first].error and "empty" in by_id[second].error
    assert [by_id[i].reason for i in (first, second, third)] == ["refused", "refused", "length"]


def test_a_tokenizer_larger_than_the_vocabulary(folder: Path) -> None:
    shutil.copy(BYTES, folder / "tokenizer.json")
    with pytest.raises(WorkbenchError, match=f"does not match the vocabulary.* ends at {VOCAB - 1}"):
        load(folder, backend="eager")


def _lose_a_shard(folder: Path) -> None:
    save_folder(folder, SPEC, random_weights(SPEC, torch.float32), torch.float32, shard_bytes=2000)
    sorted(folder.glob("model-*.safetensors"))[0].unlink()


WEIGHTS = "model.safetensors"
HARM: dict[str, Callable[[Path], object]] = {
    "cut short .*fetch the file again": lambda to: (to / WEIGHTS).write_bytes((to / WEIGHTS).read_bytes()[:-100]),
    "corrupt .*header is not JSON": lambda to: (to / WEIGHTS).write_bytes(struct.pack("<Q", 8) + b"notjson!"),
    "cut short in its header": lambda to: (to / WEIGHTS).write_bytes(b""),
    "pytorch_model.bin: is refused: it is cut short, or pickled":
        lambda to: (to / WEIGHTS).rename(to / "pytorch_model.bin"),
    "holds no weights": lambda to: (to / WEIGHTS).unlink(),
    "1 of .* shards are missing: model-00001": _lose_a_shard,
    "no config.json in it": lambda to: (to / "config.json").unlink(),
    "config.json: is not valid JSON": lambda to: (to / "config.json").write_text("{"),
    "tokenizer.json: no readable tokenizer": lambda to: (to / "tokenizer.json").write_text("{"),
}  # fmt: skip


@pytest.mark.parametrize("message", HARM)
def test_a_damaged_folder_is_refused_by_name(folder: Path, message: str) -> None:
    load(folder, backend="eager")
    HARM[message](folder)
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


def only(monkeypatch: pytest.MonkeyPatch, *working: Backend) -> None:
    problems = {backend: None if backend in working else "no C++ compiler found" for backend in Backend}
    monkeypatch.setattr(lanes_module, "backend_problems", lambda: problems)


def test_without_compilers_auto_is_eager_and_a_backend_that_was_asked_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only(monkeypatch, Backend.EAGER)
    with pytest.raises(WorkbenchError, match="backend 'inductor' does not work here: no C[+][+] compiler found"):
        load("shape:tiny", backend="inductor")
    runner = load("shape:tiny", backend="auto")
    assert runner.model.backend == runner.core.backends.decode == Backend.EAGER
    assert "inductor does not work here: no C++ compiler found" in runner.core.backends.reason


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
    message = "auto: triton does not work here: no C++ compiler found"
    assert select_backends("auto", cuda) == Backends.uniform(Backend.INDUCTOR, message)
    monkeypatch.setattr(load_module, "_device", lambda name: torch.device(name))
    with pytest.raises(WorkbenchError, match="backend 'mlir' does not work here"):
        load("shape:tiny", backend="mlir", device="cuda")


def test_pages_left_to_us_hold_every_sequence_in_full(folder: Path) -> None:
    runner = load(folder, backend="eager", max_num_seqs=3, page_size=7)
    assert runner.scheduler.pools[0].num_pages == 3 * -(-SPEC.max_position_embeddings // 7)
    assert load(folder, backend="eager", pages=5).scheduler.pools[0].num_pages == 5


def test_the_front_door_is_this_load() -> None:
    assert workbench.load is load


def test_reported_once_it_takes_long() -> None:
    messages, heard = [], threading.Event()

    def tell(line: str) -> None:
        messages.append(line)
        heard.set()

    with report_if_slow("compiling", tell, seconds=0.01):
        assert heard.wait()
    with report_if_slow("quick", tell, seconds=3600):
        pass
    with pytest.raises(ValueError), report_if_slow("broken", tell, seconds=3600):
        raise ValueError
    assert messages == ["compiling"]


def test_a_long_wait_says_again_and_again_how_long_it_has_gone_on_and_how_long_still() -> None:
    messages: list[str] = []
    often = threading.Event()

    def tell(line: str) -> None:
        messages.append(line)
        if len(messages) == 3:
            often.set()

    with report_if_slow("compiling", tell, seconds=0.01, usual=3600, again=0.01):
        assert often.wait(limit(60))
    assert messages[0].startswith("compiling (about 36")
    assert all(each.startswith("compiling: 0 s so far, about ") and each.endswith("still") for each in messages[1:])
    assert progress._waiting_words(99.0, 60.0, is_first=False) == ": 99 s so far, longer than usual"
    often.clear()
    messages.clear()
    with report_if_slow("loading", tell, seconds=0.01, again=0.01, share=lambda: 1e-6 if messages else 0.0):
        assert often.wait(limit(60))
    assert messages[0] == "loading" and all("s so far, about " in each for each in messages[1:])


@pytest.mark.parametrize(("stored", "words"), [("q8_0", False), ("q8_0", True), ("dense", True)])
def test_a_load_knows_its_share_of_the_weights_and_reads_scales_once(
    stored: str, words: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matrices that stay in words no scale is looked at before they are read."""
    if not words:
        monkeypatch.setattr(GGUFStoredTensor, "own_format", lambda self: None)
    path, scales, shares = tmp_path / "model.gguf", Counter[str](), list[float]()
    convert_to_gguf(BUNDLED_MODELS["demo-draft"], path, stored, torch.float32)
    read = GGUFStoredTensor.quantized
    monkeypatch.setattr(GGUFStoredTensor, "quantized", lambda self: scales.update([self.info.name]) or read(self))
    source, settings = load_module._source(str(path), AttentionConfig()), ModelConfig(name=str(path))
    shares.append(source.share_read())
    format = source.weight_format(EngineConfig(model=settings, backend="eager"))[0]
    shares.append(source.share_read())
    state = source.state(torch.float32, 0, format, {}, discard, lambda each: shares.append(source.share_read()) or each)
    looked_at = not words or stored == "dense"
    assert shares == sorted(shares) and shares[0] == 0 and 0 <= shares[1] < 1 and source.share_read() == 1
    assert (shares[1] > 0) == looked_at
    assert len(shares) == 2 + len(source.wanted) and state and set(scales.values()) == ({1} if looked_at else set())
    assert source.checkpoint.kept == {}, "scales take memory"


def test_loading_tells_what_takes_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    heard = threading.Event()

    def slow(backends, *_, **settings):
        assert heard.wait()
        return backends

    def tell(line: str) -> None:
        if line.startswith("trying which backend decodes shape:tiny fastest here"):
            heard.set()  # not for a line of what came before, which a busy machine makes long as well

    monkeypatch.setattr(load_module, "autotune_backend", slow)
    with monkeypatch.context() as soon:
        soon.setattr(progress, "SLOW_SECONDS", 0.01)
        load("shape:tiny", backend="auto", report=tell)
    assert heard.is_set()
    load("shape:tiny", backend="eager")
    assert capsys.readouterr().err == ""
