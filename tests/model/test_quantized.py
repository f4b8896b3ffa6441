"""Weights and the formats in which they can be stored."""

from __future__ import annotations

import pytest

from tests.engine.tiny import layer, spec_of
from workbench.errors import WorkbenchError
from workbench.model.quantized import WeightFormat


@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_layer_is_looked_at(place: int) -> None:
    """One layer of three has a feed-forward that groups of 4 do not divide, or heads."""
    format = WeightFormat.parse("int4", quant_group=4)
    kinds = [layer()] * 3
    format.check(spec_of(*kinds))
    for wrong, message in (
        (layer().model_copy(update={"intermediate_size": 14}), "do not divide its intermediate_size of 14"),
        (layer(3, 1, 2), "do not divide its heads x dim of 6"),
    ):
        with pytest.raises(WorkbenchError, match=message):
            format.check(spec_of(*kinds[:place], wrong, *kinds[place + 1 :]))
