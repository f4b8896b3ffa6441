"""Saving of a model as a Hugging Face folder, which transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.files import write_atomically
from workbench.model.formats.safetensors_files import INDEX_FILE, SINGLE_FILE
from workbench.model.hf.families import config_from_spec
from workbench.model.parameters import StoredPart, parameter_shapes, part_bytes, stored_parameters
from workbench.model.spec import ModelSpec

SHARD_BYTES = 5_000_000_000


def save_folder(
    folder: str | Path,
    spec: ModelSpec,
    state: dict[str, Tensor],
    dtype: torch.dtype,
    tokenizer_file: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json, the weights under their Hugging Face names as `dtype`, and tokenizer.json.

    A model that stood there before is replaced. Each file appears whole or not at all, config.json last.
    Weights above `shard_bytes` are cut into shards. Raises WorkbenchError for a state that is not the spec's
    and for a folder that cannot be written.
    """
    folder = Path(folder)
    config = config_from_spec(spec, dtype)
    _check(spec, state)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_weights(folder, spec, state, dtype, shard_bytes)
        if tokenizer_file is not None:
            content = Path(tokenizer_file).read_bytes()
            write_atomically(folder / "tokenizer.json", lambda file: file.write(content))
        _write_json(folder / "config.json", config)
    except (OSError, SafetensorError) as error:
        raise WorkbenchError(f"{folder}: the model cannot be written there ({error})") from error


def _write_weights(
    folder: Path, spec: ModelSpec, state: dict[str, Tensor], dtype: torch.dtype, shard_bytes: int
) -> None:
    shards = _shards(spec, dtype.itemsize, shard_bytes)
    names = [SINGLE_FILE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    for name, parts in zip(names, shards, strict=True):
        # A clone per part: slices of a fused parameter share memory, which the format does not allow.
        tensors = {part.name: _clone(state[ours], start, part, dtype) for ours, start, part in parts}
        write_atomically(
            folder / name, lambda file, held=tensors: save_file(held, file.name, metadata={"format": "pt"})
        )
    if len(shards) > 1:
        places = {part.name: name for name, parts in zip(names, shards, strict=True) for _, _, part in parts}
        total = sum(part_bytes(part, dtype.itemsize) for parts in shards for _, _, part in parts)
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})
    stale = {*folder.glob("model-*-of-*.safetensors"), *folder.glob(SINGLE_FILE), *folder.glob(INDEX_FILE)}
    for file in stale - {folder / name for name in names} - ({folder / INDEX_FILE} if len(shards) > 1 else set()):
        file.unlink()


def _shards(spec: ModelSpec, itemsize: int, shard_bytes: int) -> list[list[tuple[str, int, StoredPart]]]:
    """Return parts as (our parameter, first row in it, part), cut where the next would pass `shard_bytes`."""
    shards: list[list[tuple[str, int, StoredPart]]] = [[]]
    used = 0
    for ours, parameter in stored_parameters(spec).items():
        start = 0
        for part in parameter.parts:
            size = part_bytes(part, itemsize)
            if shards[-1] and used + size > shard_bytes:
                shards.append([])
                used = 0
            shards[-1].append((ours, start, part))
            used, start = used + size, start + part.shape_here[0]
    return shards


def _clone(parameter: Tensor, start: int, part: StoredPart, dtype: torch.dtype) -> Tensor:
    rows = parameter.detach()[start : start + part.shape_here[0]]
    rows = rows if part.layout is None else part.layout.to_stored(rows)
    return rows.to(device="cpu", dtype=dtype, copy=True).contiguous()


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05}-of-{count:05}.safetensors"


def _write_json(file: Path, value: object) -> None:
    text = json.dumps(value, indent=2) + "\n"
    write_atomically(file, lambda out: out.write(text.encode()))


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
