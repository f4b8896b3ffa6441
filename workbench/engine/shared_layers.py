"""Build a model from some layers of another model. Both share the modules, so the weights are in memory once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from workbench.engine.loaded_model import LoadedModel
from workbench.errors import WorkbenchError
from workbench.model.attention_spec import AttentionSpec
from workbench.model.rotary import build_rotary_table, rotaries_of_model
from workbench.model.transformer import ModulesOf, Transformer

SHARED = ("norm", "embedding_norm", "positions", "embedding", "head", "_empty")  # modules outside of the layers


def share_layers(loaded: LoadedModel, layers: Sequence[int] | None) -> LoadedModel:
    """Return a model with only the given layers of `loaded`, in ascending order; None: all layers.

    Raises:
        WorkbenchError: for an unknown layer, and for models with layers that depend on other layers.
    """
    model, spec = loaded.transformer, loaded.transformer.spec
    chosen = tuple(range(len(spec.layers))) if layers is None else tuple(layers)
    where = "speculate.layers"
    if beyond := [layer for layer in chosen if layer >= len(spec.layers)]:
        raise WorkbenchError(f"{where}: layer {beyond[0]} of {spec.name}, whose layers are 0 to {len(spec.layers) - 1}")
    if loaded.processes is not None:
        raise WorkbenchError(f"{where}: ranks share the target's layers; leave parallel.tensor or the draft out")
    if model.streams is not None:
        raise WorkbenchError(f"{where}: {spec.name} has several residual streams: its layers cannot draft")
    borrowing = [
        layer
        for layer in chosen
        if isinstance(attention := spec.layers[layer].attention, AttentionSpec) and attention.kv_shared_with is not None
    ]
    if borrowing and len(chosen) < len(spec.layers):
        raise WorkbenchError(f"{where}: layer {borrowing[0]} of {spec.name} reads the keys of another; leave it out")
    shortened = spec.model_copy(update={"layers": tuple(spec.layers[layer] for layer in chosen)})
    with torch.device("meta"):
        made = Transformer(shortened, model.backend, model.format)
    made.blocks = ModulesOf(model.blocks[layer] for layer in chosen)
    for name in SHARED:
        setattr(made, name, getattr(model, name))
    made.rotary = ModulesOf(map(build_rotary_table, rotaries_of_model(shortened))).to(model.device)
    return replace(loaded, transformer=made.requires_grad_(False).eval())
