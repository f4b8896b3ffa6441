"""The mask of `sparse_decode.yaml` hides what it says."""

from __future__ import annotations

from pathlib import Path

import torch

from experiments import sparse_decode
from experiments.zoo.bigbird import BigBird
from workbench.experiment.experiment import Experiment

EXPERIMENT = Experiment.from_file(Path(sparse_decode.__file__).with_suffix(".yaml"))


def test_the_mask_hides_three_quarters_of_the_context() -> None:
    for name in sparse_decode.BACKENDS:
        settings = EXPERIMENT.variants[f"{name}, sparse"]
        mask = BigBird(**settings["attention.mask"]["arguments"])
        query = torch.arange(4096, 4096 + 32)[:, None]
        shown = mask(query, torch.arange(4096 + 32)).sum(1)
        assert bool((shown <= (query[:, 0] + 1) // 4 + mask.block).all())
