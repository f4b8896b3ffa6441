"""Save a model as a Hugging Face folder, which transformers loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.files import write_atomically
from workbench.model.hf.families import config_from_spec
from workbench.model.hf.shards import SHARD_BYTES, write_json, write_shards
from workbench.model.model_parameters import parameter_shapes, stored_parameters
from workbench.model.spec import ModelSpec


def save_folder(
    folder: str | Path,
    spec: ModelSpec,
    state: dict[str, Tensor],
    dtype: torch.dtype,
    tokenizer_file: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json, the weights under their Hugging Face names as `dtype`, and tokenizer.json.

    An existing model is replaced. Each file is written atomically, config.json last. Weights above `shard_bytes` are
    split into shards. Raises WorkbenchError for a state that does not match the spec, and for a folder that cannot be
    written.
    """
    folder = Path(folder)
    config = config_from_spec(spec, dtype)
    _check(spec, state)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_shards(folder, _tensors(spec, state, dtype), shard_bytes)
        if tokenizer_file is not None:
            content = Path(tokenizer_file).read_bytes()
            write_atomically(folder / "tokenizer.json", lambda file: file.write(content))
        write_json(folder / "config.json", config)
    except (OSError, SafetensorError) as error:
        raise WorkbenchError(f"{folder}: the model cannot be written there ({error})") from error


def _tensors(spec: ModelSpec, state: dict[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for ours, parameter in stored_parameters(spec).items():
        for part, own in parameter.to_stored(state[ours]):
            yield part.name, own.to(dtype)


def _check(spec: ModelSpec, state: dict[str, Tensor]) -> None:
    shapes = parameter_shapes(spec)
    wrong = sorted(shapes.keys() ^ state.keys())
    if wrong:
        fault = "is missing from the state" if wrong[0] in shapes else "is no parameter of the spec"
        raise WorkbenchError(f"{spec.name}: {wrong[0]} {fault}")
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            given = list(state[name].shape)
            raise WorkbenchError(f"{spec.name}: {name} has shape {given}, the spec asks for {list(shape)}")
