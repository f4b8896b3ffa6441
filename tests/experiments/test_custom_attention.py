"""The worked example's variants keep the laws, its mistake does not, and the demo model runs with each."""

from __future__ import annotations

import pytest
import torch

from experiments import custom_attention
from workbench.engine.load import load
from workbench.inspect.mask_picture import draw_mask
from workbench.testing import check_attention


@pytest.mark.parametrize("part", [custom_attention.Dilated, custom_attention.fading, custom_attention.Gated])
def test_its_variants_keep_the_laws(part) -> None:
    check_attention(part, examples=4, backends=["eager"]).raise_if_failed()


def test_its_mistake_is_reported() -> None:
    assert "shows key 1 to query 0" in str(check_attention(custom_attention.peeking, examples=4, backends=[]))


def test_the_demo_model_runs_with_each() -> None:
    here = "experiments.custom_attention:"
    ids = list(range(40))
    plain = load("demo", backend="eager", dtype="float32").model.logits(ids)
    for attention in ({"mask": "dilated"}, {"score": here + "fading"}, {"module": here + "Gated"}):
        rows = load("demo", backend="eager", dtype="float32", attention=attention).model.logits(ids)
        assert rows.isfinite().all() and not torch.allclose(rows[-1], plain[-1], atol=1e-3), attention


def test_its_mask_is_drawn() -> None:
    assert draw_mask(custom_attention.Dilated(), 32).startswith("<svg")
