"""The rule on a sparse mask's decode names the backends on which it is as fast; the mask hides what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments import sparse_decode
from experiments.zoo.bigbird import BigBird
from workbench.experiment.experiment import Experiment

EXPERIMENT = Experiment.from_file(Path(sparse_decode.__file__).with_suffix(".yaml"))


@pytest.mark.parametrize(
    ("seconds", "outcome"),
    [((1.0, 0.5, 0.9), "holds"), ((1.1, 1.0, 0.2), "holds-with-limits"), ((1.1, 1.01, 2.0), "refuted")],
)
def test_a_sparse_step_is_held_to_full_attention(seconds: tuple[float, ...], outcome: str) -> None:
    of_sparse = dict(zip(sparse_decode.BACKENDS, seconds, strict=True))
    rows = [
        {"variant": f"{name}, {kind}", "curve": [{"decode_step_s": of_sparse[name] if kind == "sparse" else 1.0}]}
        for name in sparse_decode.BACKENDS
        for kind in ("full", "sparse")
    ]
    (verdict,) = sparse_decode.judge(rows)
    assert verdict.outcome == outcome


def test_the_mask_hides_three_quarters_of_the_context() -> None:
    for name in sparse_decode.BACKENDS:
        settings = EXPERIMENT.variants[f"{name}, sparse"]
        mask = BigBird(**settings["attention.mask"]["arguments"])
        query = torch.arange(4096, 4096 + 32)[:, None]
        shown = mask(query, torch.arange(4096 + 32)).sum(1)
        assert bool((shown <= (query[:, 0] + 1) // 4 + mask.block).all())
