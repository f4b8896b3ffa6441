"""The kit for cache formats: what it says of ours, and of ones that break a law."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_kernels.quantized_attention import QuantizationRule
from workbench.errors import WorkbenchError
from workbench.kv_cache import quantized
from workbench.kv_cache.format import CacheFormat
from workbench.testing import check_kv_format, kv_format, kv_scenarios

KINDS = ("dense", "int8", "int4", "fp8")
SMALL = {"format": "int4", "quant_group": 8, "residual_length": 5}


def only(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One law is enough where it is to be broken: finding the least example takes its time."""
    monkeypatch.setattr(kv_format, "KV_LAWS", {law: kv_format.KV_LAWS[law]})


@pytest.mark.parametrize("format", [SMALL, {**SMALL, "format": "int8", "rotate": True, "num_sink_tokens": 3}])
def test_our_formats_keep_every_law(format: dict) -> None:
    report = check_kv_format(format, examples=2, backends=("eager",))
    assert report.passed and len(report.laws) == 8, str(report)


def test_settling_by_the_batch_and_not_by_the_position_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query of a chunk reads what the chunk's last one may: prefill in one step is another model then."""

    def is_quantized(self: QuantizationRule, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key >= self.num_sink_tokens) & (key < self.quantized_until_each(query.max() + 1))

    monkeypatch.setattr(QuantizationRule, "is_quantized", is_quantized)
    only("chunked = whole = decoded one by one", monkeypatch)
    assert not check_kv_format(SMALL, examples=8, backends=()).passed


def test_a_group_that_is_not_settled_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "quantize_pages", lambda *_: None)
    only("batched = alone", monkeypatch)
    assert not check_kv_format(SMALL, examples=8, backends=()).passed


def test_a_layer_is_tried_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of layer 9 alone is found, in models and on backends."""
    format = {**SMALL, "format": "dense", "layers": {9: {"format": "int4"}, 11: {"format": "int4"}}}
    only("batched = alone", monkeypatch)
    sound = check_kv_format(format, examples=1, backends=("eager",))
    assert sound.passed and all(law.tried for law in sound.laws), str(sound)
    monkeypatch.setattr(quantized, "quantize_pages", lambda *_: None)
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


def test_a_format_that_cannot_be_is_refused() -> None:
    with pytest.raises(WorkbenchError, match="unknown cache format 'int5'"):
        check_kv_format("int5")
