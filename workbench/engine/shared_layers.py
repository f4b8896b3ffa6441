"""A model made of some layers of another, whose modules it shares: weights are in memory once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from workbench.engine.loaded_model import LoadedModel
from workbench.errors import WorkbenchError
from workbench.model.attention_spec import AttentionSpec
from workbench.model.rotary import build_rotary_table, rotaries_of_model
from workbench.model.transformer import ModulesOf, Transformer

SHARED = ("norm", "embedding_norm", "positions", "embedding", "head", "_empty")  # what is no layer


def share_layers(loaded: LoadedModel, layers: Sequence[int] | None) -> LoadedModel:
    """Return the model of `loaded` with these of its layers alone, in ascending order; all for None.

    Raises:
        WorkbenchError: for a layer that is not there, and for models whose layers do not stand alone.
    """
    model, spec = loaded.transformer, loaded.transformer.spec
    chosen = tuple(range(len(spec.layers))) if layers is None else tuple(layers)
    where = "speculate.layers"
    if beyond := [layer for layer in chosen if layer >= len(spec.layers)]:
        raise WorkbenchError(f"{where}: layer {beyond[0]} of {spec.name}, whose layers are 0 to {len(spec.layers) - 1}")
    if loaded.processes is not None:
        raise WorkbenchError(f"{where}: ranks share the target's layers; leave parallel.tensor or the draft out")
    if model.streams is not None:
        raise WorkbenchError(f"{where}: layers of {spec.name} take residual streams, and do not stand alone")
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
