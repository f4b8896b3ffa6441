"""Build decode steps whose size grows along one axis: context, batch, layers or vocabulary."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from workbench.bench.model import BenchCase
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner
from workbench.engine.shared_layers import share_layers
from workbench.model.linear import Linear

AXES = {"context": (256, 1024, 2048, 4096), "batch": (1, 2, 4, 8), "layers": (30, 20, 10, 5),
        "vocabulary": (49_152, 24_576, 12_288, 6_144)}  # fmt: skip


def grown(config: EngineConfig, loaded: LoadedModel, axis: str, value: int, steps: int) -> tuple[BenchCase, Runner]:
    """Return a case of `steps` decode steps, and its runner. By default one sequence decodes at a context of 256
    tokens; `value` replaces the size along `axis`. For fewer layers or a smaller vocabulary, a dense model is cut to
    its first layers, or to the first rows of its tied embedding."""
    made = share_layers(replace(loaded, tokenizer=None), range(value) if axis == "layers" else None)
    model = made.transformer
    if axis == "vocabulary" and model.embedding is not None:
        model.spec = model.spec.model_copy(update={"vocab_size": value})
        table = model.embedding.weight[:value]
        model.embedding = Linear(table.shape[1], value, False, model.backend)
        model.embedding.weight = nn.Parameter(table, requires_grad=False)
    sizes = {"batch": 1, "context": 256, axis: value}
    return BenchCase("decode", sizes["batch"], 0, sizes["context"], steps), Runner(config, made)
