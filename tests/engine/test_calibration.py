"""Codecs that are calibrated: on the model's own keys and values, once, by layer, always alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench
from tests.engine.tiny import layer, model_of, spec_of
from workbench.cluster.replica import fingerprint_of
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.executors.calibration import CALIBRATION_TEXT, calibrate_codecs, calibration_windows, keys_and_values
from workbench.inspect.whole_text import TextAttention
from workbench.kv_cache.codec import CodecPair
from workbench.kv_cache.format import CacheFormat, CodecCalibration
from workbench.request import CustomPart
from workbench.testing import check_kv_format, kv_format
from workbench.testing.law import ConformityReport

HERE = "tests.engine.test_calibration"


class Scaled:
    """Bytes with a scale from a sample."""

    def __init__(self, sample: torch.Tensor):
        self.scales = sample.abs().amax((0, 2)).clamp_min(1e-3)[:, None]

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((rows.float() / self.scales * 127).round().clamp(-127, 127).to(torch.int8),)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return codes * self.scales / 127


class ByHead:
    """A codec that is calibrated; `seen` is what the last one was given."""

    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def calibrate(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> CodecPair:
        self.seen[layer] = keys, values
        return CodecPair(Scaled(keys), Scaled(values))


class OfTheSample(ByHead):
    """It stores as many columns as the sample has tokens."""

    def calibrate(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        class Wide(Scaled):
            def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return *super().encode(rows), rows[..., :1].expand(*rows.shape[:-1], len(keys))

            def decode(self, codes: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
                return super().decode(codes)

        return Wide(keys)


class Drawn(ByHead):
    """Another codec each time."""

    def calibrate(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> CodecPair:
        return CodecPair(Scaled(keys * torch.rand(1)), Scaled(values))


class Grouped(ByHead):
    def calibrate(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> CodecPair:
        return CodecPair(Scaled(keys), Scaled(values), group=8)


class Failing(ByHead):
    def calibrate(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> CodecPair:
        raise ZeroDivisionError("by design")


def cache(name: str = "ByHead", **settings: Any) -> CacheFormat:
    return CacheFormat(codec=CustomPart(path=f"{HERE}:{name}"), **settings)


def test_a_sample_is_what_the_model_computes() -> None:
    """Against the keys and values of whole texts, which have no pages; a window of the model does not matter."""
    model = model_of(spec_of(layer(4, 2), layer(2, 1, sliding_window=5)), 3)
    windows = [tuple(range(20)), tuple(range(9, 2, -1))]
    sample = keys_and_values(model, windows)
    texts = [TextAttention(model, ids) for ids in windows]
    for index, (keys, values) in enumerate(sample):
        assert keys.dtype == torch.float32 and keys.shape == (27, model.spec.layers[index].attention.num_kv_heads, 4)
        for rows, name in ((keys, "k"), (values, "v")):
            expected = torch.cat([getattr(text.layers[index], name) for text in texts])
            torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)


def test_each_layer_gets_its_own_once() -> None:
    model = model_of(spec_of(layer(), layer(), layer()), 1)
    format = cache(layers={1: {"format": "int8", "quant_group": 8, "columns": 8}})
    specs = calibrate_codecs(model, model.cache_shapes(format), CodecCalibration(tokens=30), None)
    assert [spec.codec is not None for spec in specs] == [True, False, True]
    found = [spec.codec for spec in specs if spec.codec is not None]
    assert not any(codec.needs_calibration for codec in found) and found[0] is not found[1]
    scales = [next(codec.tensors()) for codec in found]
    assert not torch.equal(*scales), "layers differ"
    again = calibrate_codecs(model, model.cache_shapes(format), CodecCalibration(tokens=30), None)
    assert all(torch.equal(a, b) for a, b in zip(found[0].tensors(), again[0].codec.tensors(), strict=True))  # type: ignore[union-attr] (it has one)
    assert calibrate_codecs(model, specs, CodecCalibration(), None) is specs, "nothing is left to calibrate"


def test_an_engine_calibrates_when_it_is_made() -> None:
    model = model_of(spec_of(layer(), layer()), 1)
    runner = Runner(EngineConfig.build(cache=cache(), pages=4), LoadedModel(model))
    assert len(runner.store.codec_tensors) == 4 and runner.store.codec_bytes == 4 * 4
    assert runner.store.bytes == runner.store.expected_bytes
    same = Runner(EngineConfig.build(cache=cache(), pages=4), LoadedModel(model))
    assert fingerprint_of(runner) == fingerprint_of(same)
    same.store.codec_tensors[0].mul_(2)
    assert fingerprint_of(runner) != fingerprint_of(same), "another codec answers otherwise"


def test_the_text(tmp_path: Path) -> None:
    runner = workbench.load("demo", backend="eager", pages=2)
    whole = tuple(runner.tokenizer.encode(CALIBRATION_TEXT.read_text()))  # type: ignore[union-attr] (the demo has one)
    arguments = runner.model, runner.tokenizer

    def windows(**settings: Any) -> list[tuple[int, ...]]:
        return calibration_windows(arguments[0], CodecCalibration(**settings), arguments[1])

    assert windows() == [whole[:1024]] and windows(tokens=1500) == [whole[:1024], whole[1024:1500]]
    mine = tmp_path / "mine.txt"
    mine.write_text("def mine(): ...\n")
    assert windows(text=str(mine)) == [tuple(runner.tokenizer.encode("def mine(): ...\n"))]  # type: ignore[union-attr] (the demo has one)
    mine.write_text("")
    with pytest.raises(WorkbenchError, match="mine.txt is empty"):
        windows(text=str(mine))
    with pytest.raises(WorkbenchError, match="calibration.text: .*cannot be read"):
        windows(text=str(tmp_path / "none.txt"))
    assert EngineConfig.build(cache={"calibration": {"tokens": 9}}).cache.calibration.tokens == 9


def only(law: str, monkeypatch: pytest.MonkeyPatch, name: str) -> ConformityReport:
    monkeypatch.setattr(kv_format, "KV_LAWS", {law: kv_format.KV_LAWS[law]})
    return check_kv_format(cache(name), examples=2, backends=())


def test_the_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    report = check_kv_format(cache(), examples=1, backends=())
    assert report.passed and len(report.laws) == 8, str(report)
    for name, words in (("Drawn", "calibrated twice"), ("OfTheSample", "depend on the sample")):
        report = only(kv_format.CALIBRATED_LAW, monkeypatch, name)
        assert not report.passed and words in str(report)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("OfTheSample", "sizes must not depend on the sample"),
        ("Grouped", "calibrate returned a codec of groups of 8; declare `group` as 8 on the class"),
        ("Failing", "calibrate raised ZeroDivisionError: by design"),
    ],
)
def test_what_is_refused(name: str, words: str) -> None:
    model = model_of(spec_of(layer()), 1)
    with pytest.raises(WorkbenchError, match=words):
        Runner(EngineConfig.build(cache=cache(name), pages=4), LoadedModel(model))
