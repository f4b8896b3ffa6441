"""A model's weights as a dict of tensors: loaded from a folder, or random."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.model.formats.checkpoint import Checkpoint
from workbench.model.formats.open import open_checkpoint
from workbench.model.hf.families import read_names
from workbench.model.hf.kept import kept_matrices
from workbench.model.parameters import StoredParameter, StoredPart, parameter_shapes, stored_parameters
from workbench.model.quantized import WeightFormat, scales_of
from workbench.model.spec import ModelSpec

DENSE_FORMAT = WeightFormat()
IGNORED_TENSORS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")
XIELU_VALUES = {"alpha_p": 0.2, "alpha_n": -1.05, "beta": 0.5, "eps": -1e-6}  # before training: alphas of 0.8
DRAW_CHUNK = 1 << 22  # random numbers drawn at once, in float32: 16 MiB


def load_weights(
    path: str | Path, spec: ModelSpec, dtype: torch.dtype, format: WeightFormat = DENSE_FORMAT
) -> dict[str, Tensor]:
    """Load the weights of the folder or file as `dtype`, under our names and shapes (`parameter_shapes(spec)`).

    Files are memory-mapped: a parameter that needs neither a cast nor fusing stays a view of its file. A matrix that
    the files store exactly as `format` does is codes, with scales beside it; others are dense. Raises WorkbenchError
    for weights that are absent, corrupt or of another architecture.
    """
    checkpoint = open_checkpoint(path)
    return read_weights(checkpoint, spec, wanted_parameters(checkpoint, spec), dtype, format)


def read_weights(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    wanted: dict[str, StoredParameter],
    dtype: torch.dtype,
    format: WeightFormat = DENSE_FORMAT,
) -> dict[str, Tensor]:
    """Read the `wanted` weights of an open checkpoint, as `load_weights` does."""
    tied = spec.tie_word_embeddings
    kept = {} if format == DENSE_FORMAT else kept_matrices(checkpoint, wanted, tied, format)
    state: dict[str, Tensor] = {}
    for name, parameter in wanted.items():
        if name in kept:
            ours = "head.weight" if tied and name == "embedding.weight" else name
            state[ours], state[scales_of(ours)] = kept[name].tensors()
        else:
            state[name] = read_parameter(checkpoint, parameter, dtype)
    return state


def read_parameter(checkpoint: Checkpoint, parameter: StoredParameter, dtype: torch.dtype) -> Tensor:
    """Read one parameter as `dtype`; a view of its file where it needs neither a cast nor fusing."""

    def read(part: StoredPart) -> Tensor:
        tensor = checkpoint.tensors[part.name].read()
        return tensor if part.layout is None else part.layout.from_stored(tensor)

    if len(parameter.parts) == 1:
        return read(parameter.parts[0]).to(dtype).contiguous().view(parameter.shape)
    rows = [part.shape_here[0] for part in parameter.parts]
    whole = torch.empty((sum(rows), *parameter.parts[0].shape_here[1:]), dtype=dtype)
    for target, part in zip(whole.split(rows), parameter.parts, strict=True):
        target.copy_(read(part))
    return whole.view(parameter.shape)


def wanted_parameters(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, StoredParameter]:
    """Return the parts of each parameter of `spec` under the checkpoint's names. Raises WorkbenchError where it lacks
    one, has others, or has one in another shape or in a type that is not read."""
    stored, names = checkpoint.tensors, checkpoint.names or read_names(checkpoint.config)
    if f"{names.embedding}.weight" not in stored and f"{names.embedding}.weight".partition(".")[2] in stored:
        names = names.without_prefix()  # the files of a base model, as GPT-2's are
    wanted = stored_parameters(spec, names)
    _check(checkpoint, spec, [part for parameter in wanted.values() for part in parameter.parts])
    return wanted


def random_weights(spec: ModelSpec, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Draw seeded random weights under which activations and logits stay near 1; norms multiply by ones.

    Every parameter is drawn in float32 from a generator of its own, seeded by `seed` and its name: order does not
    change the numbers, and the dtype only rounds them.
    """
    shapes = parameter_shapes(spec)
    # One parameter is drawn by one thread, independent of torch's setting; several parameters can be drawn at once.
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        drawn = threads.map(lambda name: _random(name, shapes[name], spec, dtype, seed), shapes)
        return dict(zip(shapes, drawn, strict=True))


def _check(checkpoint: Checkpoint, spec: ModelSpec, wanted: list[StoredPart]) -> None:
    stored, known = checkpoint.tensors, {part.name for part in wanted}
    missing = [part.name for part in wanted if part.name not in stored]
    extra = [name for name in stored if name not in known and not _harmless(name, spec)]
    if missing or extra:
        faults = [f"{what} {_some(names)}" for what, names in (("lacks", missing), ("has extra", extra)) if names]
        if missing == ["lm_head.weight"]:
            faults.append("if the head is the embedding, config.json must say tie_word_embeddings: true")
        raise WorkbenchError(f"{checkpoint.path}: the weights are not those of config.json ({'; '.join(faults)})")
    for part in wanted:
        tensor = stored[part.name]
        if tensor.shape != part.shape:
            shape, right = list(tensor.shape), list(part.shape)
            raise WorkbenchError(f"{tensor.file}: {part.name} has shape {shape}, config.json asks for {right}")
        if problem := tensor.problem():
            raise WorkbenchError(f"{tensor.file}: {part.name} {problem}")


def _harmless(name: str, spec: ModelSpec) -> bool:
    return name.endswith(IGNORED_TENSORS) or (spec.tie_word_embeddings and name == "lm_head.weight")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _random(name: str, shape: tuple[int, ...], spec: ModelSpec, dtype: torch.dtype, seed: int) -> Tensor:
    if name.endswith("norm_weight"):
        return torch.ones(shape, dtype=dtype)
    if name.endswith("norm.weight"):
        return torch.full(shape, 1.0 - spec.norm.offset, dtype=dtype)
    if ".activation." in name:
        return torch.full(shape, XIELU_VALUES[name.rpartition(".")[2]], dtype=dtype)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    values = torch.empty(shape, dtype=dtype)
    std, flat = _std(name, shape, spec), values.view(-1)
    draws = torch.empty(min(DRAW_CHUNK, flat.numel()), dtype=torch.float32)
    for chunk in flat.split(DRAW_CHUNK):
        chunk.copy_(draws[: chunk.numel()].normal_(0.0, std, generator=generator))
    return values


def _std(name: str, shape: Iterable[int], spec: ModelSpec) -> float:
    """Return the standard deviation: 1 / sqrt(inputs) keeps a product's size; the residual sums 2 * layers terms,
    which share it (GPT-2)."""
    *_, inputs = shape
    if name.endswith("bias"):
        return 0.1
    if name.endswith("sink_logits"):
        return 1.0
    if name == "embedding.weight" and not spec.tie_word_embeddings:
        return 1.0 / spec.embedding_scale
    added = name.endswith(("output.weight", "feedforward.down.weight", "feedforward.down"))
    return (inputs * (2 * len(spec.layers) if added else 1)) ** -0.5
