"""A threshold is the shortest text on which a mechanism changes the logits: one token less, and it changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.tiny import layer, model_of, spec_of
from workbench.check.lengths import thresholds_of
from workbench.model.attention_spec import QueryTemperature
from workbench.oracle import naive

IDS = torch.arange(40) % 29 + 1


@pytest.mark.parametrize(
    "slots",
    [
        {"sliding_window": 1},
        {"sliding_window": 5},
        {"chunk_size": 4},
        {"temperature": QueryTemperature(strength=0.5, floor=6)},
        {"temperature": QueryTemperature(strength=0.5, floor=6, offset=2)},
    ],
    ids=str,
)
def test_a_mechanism_changes_nothing_below_its_threshold(slots: dict[str, Any]) -> None:
    spec = spec_of(layer(**slots))
    (threshold,) = thresholds_of(spec)
    here, plain = (naive.logits(model_of(each), IDS[: threshold.tokens]) for each in (spec, spec_of(layer())))
    assert torch.equal(here[:-1], plain[:-1]), "shorter texts are the same without it"
    assert not torch.equal(here[-1], plain[-1])
