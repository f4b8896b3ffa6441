"""The kit for cache formats: what it says of ours, and of ones that break a law."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels.quantized_attention import QuantizationRule
from workbench.errors import WorkbenchError
from workbench.kv_cache import page_formats
from workbench.kv_cache.format import CacheFormat
from workbench.request import CustomPart
from workbench.testing import check_kv_format, kv_format, kv_scenarios
from workbench.testing.attention_scenarios import require_equal_logits

KINDS = ("dense", "int8", "int4", "fp8")
SMALL = {"format": "int4", "quant_group": 8, "residual_length": 5}


def only(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One law is enough where it is to be broken: finding the least example takes its time."""
    monkeypatch.setattr(kv_format, "KV_LAWS", {law: kv_format.KV_LAWS[law]})


@pytest.mark.parametrize("format", [SMALL, {**SMALL, "format": "int8", "rotate": True, "num_sink_tokens": 3}])
def test_our_formats_keep_every_law(format: dict) -> None:
    report = check_kv_format(format, examples=2, backends=("eager",))
    assert report.passed and len(report.laws) == 8, str(report)


def test_quantizing_by_the_batch_and_not_by_the_position_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query of a chunk reads what the chunk's last one may: prefill in one step is another model then."""

    def is_quantized(self: QuantizationRule, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key >= self.num_sink_tokens) & (key < self.quantized_until_each(query.max() + 1))

    monkeypatch.setattr(QuantizationRule, "is_quantized", is_quantized)
    only("chunked = whole = decoded one by one", monkeypatch)
    assert not check_kv_format(SMALL, examples=8, backends=()).passed


def test_a_group_that_is_not_quantized_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_formats, "quantize_pages", lambda *_: None)
    only("batched = alone", monkeypatch)
    assert not check_kv_format(SMALL, examples=8, backends=()).passed


def test_a_layer_is_tried_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of layer 9 alone is found, in models and on backends."""
    format = {**SMALL, "format": "dense", "layers": {9: {"format": "int4"}, 11: {"format": "int4"}}}
    only("batched = alone", monkeypatch)
    sound = check_kv_format(format, examples=1, backends=("eager",))
    assert sound.passed and all(law.tried for law in sound.laws), str(sound)
    monkeypatch.setattr(page_formats, "quantize_pages", lambda *_: None)
    assert not check_kv_format(format, examples=4, backends=()).passed


@given(st.dictionaries(st.integers(0, 9), st.sampled_from(KINDS)), st.sampled_from(KINDS))
def test_every_kind_of_layer_is_in_the_kits_model(layers: dict, usual: str) -> None:
    format = CacheFormat.model_validate(
        {"format": usual, "layers": {at: {"format": kind} for at, kind in layers.items()}}
    )
    tried = kv_scenarios.shrink_to_test_layers(format)
    found = [tried.for_layer(layer).key_value_formats for layer in range(kv_scenarios.num_test_layers(tried))]
    assert sorted(set(found)) == sorted({(kind, kind) for kind in (usual, *layers.values())})
    assert len(found) == 2 * len(set(found)), "twice each: with a window and without"


def test_pages_hold_whole_groups_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    format = {"format": "int8", "quant_group": 24, "residual_length": 5, "layers": {3: {"quant_group": 16}}}
    only("batched = alone", monkeypatch)
    check_kv_format(format, examples=1, backends=()).raise_if_failed()


class Exact:
    """A codec without loss: the bytes of each number."""

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rows.double().contiguous().view(torch.uint8), rows[..., :1].half()

    def decode(self, stored: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return stored.view(torch.float64)


class ByTheBatch:
    """A codec whose scale is that of all rows of a step."""

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = rows.abs().amax().clamp_min(1e-6).expand(*rows.shape[:2], 1)
        return (rows / scale * 127).round().to(torch.int8), scale.double()

    def decode(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return codes * scale / 127


class Grown:
    """A codec of one more column than there was."""

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.cat([rows, rows[..., :1]], -1),)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


HERE = "tests.testing.test_kv_kit"


def test_a_codec_keeps_every_law() -> None:
    report = check_kv_format(f"{HERE}:Exact", examples=2, backends=())
    assert report.passed and len(report.laws) == 7, str(report)
    mixed = {"format": "int8", "quant_group": 8, "residual_length": 5, "layers": {1: {"codec": f"{HERE}:Exact"}}}
    report = check_kv_format(mixed, examples=1, backends=())
    assert report.passed and len(report.laws) == 8, str(report)


@pytest.mark.parametrize("law", [kv_format.CODEC_LAW, "batched = alone"])
def test_a_codec_that_looks_at_other_rows_is_reported(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only(law, monkeypatch)
    assert not check_kv_format(f"{HERE}:ByTheBatch", examples=8, backends=()).passed


def test_a_codec_without_loss_is_the_dense_cache() -> None:
    """Bit for bit, in few pages too, after preemption and from a prefix."""

    codec = CacheFormat(codec=CustomPart(path=f"{HERE}:Exact"))

    @settings(max_examples=5)
    @given(kv_scenarios.kv_scenarios(codec), st.sampled_from([{}, {"prefix": "radix"}, {"offload": "memory"}]))
    def check(scenario: kv_scenarios.KVScenario, extra: dict[str, Any]) -> None:
        lossless, dense = (
            kv_scenarios.sampled_kv_logits(scenario, format, page_size=8, pages=9, **extra)
            for format in (codec, CacheFormat())
        )
        require_equal_logits(lossless, dense, "a codec without loss gives other rows", scenario)

    check()


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"codec": f"{HERE}:Grown"}, r"decode returned \[1, 2, 17\], not \[1, 2, 16\]"),
        ({"codec": f"{HERE}:KINDS"}, r"has no encode\(rows\)"),
        ({"codec": f"{HERE}:Exact", "format": "int8"}, "are both formats; leave one out"),
        ({"codec": f"{HERE}:Nothing"}, "has no 'Nothing'"),
    ],
)
def test_a_codec_that_is_none_is_refused(cache: dict, message: str) -> None:
    with pytest.raises(WorkbenchError, match=message):
        check_kv_format(cache, examples=1, backends=()).raise_if_failed()


def test_a_format_that_cannot_be_is_refused() -> None:
    with pytest.raises(WorkbenchError, match="unknown cache format 'int5'"):
        check_kv_format("int5")
